"""What may be decorated by `@plugin.step`, and which of its arguments is the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from tests.hosts.accelerate_loops import fresh_accelerator, plugin_for

X = torch.ones(4, 16)


class Loop:
    """A training in a class of its own; more sequences than `most` do not fit."""

    def __init__(self, plugin: rematic.RecomputePlugin, *, most: int = 4) -> None:
        self.accelerator = fresh_accelerator()
        plugin.attach(self.accelerator)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
        self.model = self.accelerator.prepare(nn.Sequential(*blocks))
        self.most = most
        self.sizes: list[int] = []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_model(self.model, x)

    def of_model(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("injected")
        loss = model(x).square().mean()
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(
    "call",
    [
        lambda plugin, loop: plugin.step(Loop.step)(loop, X),
        lambda plugin, loop: plugin.step(loop.step)(X),
        lambda plugin, loop: plugin.step(loop.step)(x=X),
        lambda plugin, loop: plugin.step(loop.of_model)(loop.model, X),
        lambda plugin, loop: plugin.step(loop.of_model)(model=loop.model, x=X),
    ],
    ids=["method", "bound method", "by name", "model first", "model first by name"],
)
def test_the_batch_is_found(call: Callable[[rematic.RecomputePlugin, Loop], object]) -> None:
    plugin = plugin_for(policy="keep")
    call(plugin, Loop(plugin))
    assert plugin.session is not None
    assert plugin.session.last_step is not None
    assert plugin.session.last_step.batch == 4


def test_the_batch_of_a_method_is_split() -> None:
    recipe = {"policy": {"op_retry": "never"}, "control": {"allow_split": True}}
    plugin = plugin_for(policy="keep", recipe=recipe)
    loop = Loop(plugin, most=2)
    plugin.step(reduction="mean")(Loop.step)(loop, X)
    assert loop.sizes[-2:] == [2, 2]


def test_what_has_done_nothing_when_it_returns_is_refused() -> None:
    plugin = plugin_for()

    def generator(x: torch.Tensor) -> Any:
        yield x

    async def coroutine(x: torch.Tensor) -> None: ...

    async def both(x: torch.Tensor) -> Any:
        yield x

    for fn in (generator, coroutine, both):
        with pytest.raises(ValueError, match=rf"{fn.__name__} is a generator or a coroutine"):
            plugin.step(fn)


def test_a_second_plugin_is_refused() -> None:
    accelerator = fresh_accelerator()
    first = plugin_for().attach(accelerator)
    with pytest.raises(ValueError, match="another plugin is attached to this Accelerator"):
        plugin_for().attach(accelerator)
    first.detach()
    plugin_for().attach(accelerator).detach()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enabled": "no"}, r"enabled is 'no': expected True or False"),
        ({"recipe": 3}, r"recipe is 3: expected `auto`, a recipe's name"),
    ],
    ids=["enabled", "recipe"],
)
def test_fields_are_checked_when_the_plugin_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rematic.RecomputePlugin(**fields)

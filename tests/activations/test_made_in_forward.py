"""What a forward makes, or changes inside containers, a replay or a retry does not make twice."""

from __future__ import annotations

import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rematic
from benchmarks.failing_ops import FailingOps, OpSurvey
from rematic.policy import Policy, Recompute

WIDTH = 6


class Block(nn.Module):
    """Changes or makes something, and drops out."""

    def __init__(self, prepare: Callable[[Any], object], act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        prepare(self)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x * (1 + self.act(self)), 0.5)
        return x + self.linear(x).tanh()


def _makes_a_buffer(block: Any) -> Any:
    if not hasattr(block, "made"):
        block.register_buffer("made", torch.zeros(WIDTH))
    return block.made.add_(torch.rand(WIDTH)).clone()


def _makes_attributes(block: Any) -> Any:
    if not hasattr(block, "made"):
        block.made, block.more = torch.rand(WIDTH), [torch.zeros(1)]
    return block.made + block.more[0].add_(1)


def _makes_a_child(block: Any) -> Any:
    if not hasattr(block, "made"):
        block.made = nn.Linear(1, WIDTH)
    return block.made(torch.ones(1))


def _makes_a_parameter(block: Any) -> Any:
    if not hasattr(block, "made"):
        block.made = nn.Parameter(torch.rand(WIDTH))
    return block.made


def _resizes(block: Any) -> Any:
    return block.held.resize_(block.held.numel() + 1).fill_(0.5).sum()


def _in_a_list(block: Any) -> Any:
    return block.held[0].add_(1).clone()


def _in_a_dictionary(block: Any) -> Any:
    return block.held["a"]["b"].mul_(2).clone()


def _in_a_tuple(block: Any) -> Any:
    block.held[0].append(1)
    return len(block.held[0])


def _in_an_array(block: Any) -> Any:
    block.held.append(1)
    return len(block.held)


def _of_an_object_in_a_list(block: Any) -> Any:
    block.held[0].number += 1
    return block.held[0].number


def _draws_from_a_list(block: Any) -> Any:
    return torch.rand(WIDTH, generator=block.held[0])


def holds(new: Callable[[], Any]) -> Callable[[Any], object]:
    return lambda block: setattr(block, "held", new())


def buffer(block: Any) -> None:
    block.register_buffer("held", torch.ones(2))


CASES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "makes a buffer": (lambda block: None, _makes_a_buffer),
    "makes attributes": (lambda block: None, _makes_attributes),
    "makes a child": (lambda block: None, _makes_a_child),
    "makes a parameter": (lambda block: None, _makes_a_parameter),
    "resizes a buffer": (buffer, _resizes),
    "tensor in a list": (holds(lambda: [torch.zeros(WIDTH)]), _in_a_list),
    "tensor in a dictionary": (holds(lambda: {"a": {"b": torch.ones(WIDTH)}}), _in_a_dictionary),
    "list in a tuple": (holds(lambda: ([],)), _in_a_tuple),
    "array": (holds(lambda: array.array("d")), _in_an_array),
    "object in a list": (holds(lambda: [SimpleNamespace(number=0)]), _of_an_object_in_a_list),
    "generator in a list": (holds(lambda: [torch.Generator().manual_seed(1)]), _draws_from_a_list),
}


def _held(block: Any) -> Any:
    held = getattr(block, "held", None)
    if isinstance(held, list) and isinstance(held[0], torch.Generator):
        return held[0].get_state().tolist()
    made = getattr(block, "made", None)
    return repr(held), repr(getattr(block, "more", None)), None if made is None else repr(made)


def make(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*CASES[name]) for _ in range(2)))


def run(name: str, policy: str | None, fails: tuple[int, ...] = ()) -> dict[str, Any]:
    """Three steps; memory runs out at ops of the first two of them."""
    model = make(name)
    chosen = Policy(name="recompute", default=Recompute()) if policy == "recompute" else policy
    session = rematic.attach(model, policy=chosen) if chosen is not None else None
    torch.manual_seed(1)
    losses = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for number in range(3):
        x = torch.full((3, WIDTH), 0.1 * (number + 1))
        with FailingOps(fails if number < 2 else ()):
            losses.append(step(x) if session is None else session.run(step, x))
    if session is not None:
        session.detach()
    return {
        "losses": torch.stack(losses).tolist(),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "buffers": [b.tolist() for b in model.buffers()],
        "held": [_held(block) for block in model],
        "generator": torch.get_rng_state().tolist(),
        "names": [name for name, _ in model.named_modules()],
    }


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_replays_leave_it_as_it_is(name: str, policy: str) -> None:
    """The replay of the safety check among them."""
    assert run(name, policy) == run(name, None)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_retries_find_it_as_it_was(name: str, policy: str) -> None:
    """Whether the unit runs again or, where that would not do, the step."""
    wanted = run(name, None)
    for position in range(4, 60, 11):
        assert run(name, policy, (position,)) == wanted, position
    assert run(name, policy, (12, 30)) == wanted


@pytest.mark.parametrize("name", ["object in a list", "generator in a list"])
def test_a_unit_that_would_not_find_it_as_it_was_does_not_run_again(name: str) -> None:
    model, x = make(name), torch.ones(3, WIDTH)
    session = rematic.attach(model, policy="keep")
    with OpSurvey() as survey, session.step(x):
        model[0](x)
    draws = [i for i, op in enumerate(survey.ops, start=1) if "bernoulli" in op.name]
    session.detach()
    model = make(name)
    session = rematic.attach(model, policy="keep")
    with FailingOps(draws[:1]), session.step(x), pytest.raises(torch.OutOfMemoryError):
        model[0](x)
    assert session._engine.units[0].num_retries == 0
    session.detach()

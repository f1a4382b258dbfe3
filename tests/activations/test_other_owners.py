"""Who else checkpoints the model: taken over, told, and given back (cases A2 and E2)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint

import rematic
from rematic.activations import Engine
from rematic.policy import Keep, Plan, Recompute
from tests.activations.blocks import Model, make_input, make_model
from tests.activations.families import LLAMA_EAGER, build_llama
from tests.activations.parity import differences, make, read_outcome, run_steps
from tests.events import Events


def counted(model: nn.Module) -> Counter[str]:
    """Counts forwards, replays too, by name of module."""
    counts: Counter[str] = Counter()
    for name, part in model.named_modules():
        forward = type(part).forward

        def count(
            *args: Any, _part: Any = part, _f: Any = forward, _n: Any = name, **kw: Any
        ) -> Any:
            counts[_n] += 1
            return _f(_part, *args, **kw)

        part.__dict__["forward"] = count
    return counts


def _wrap_blocks(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Model], None]:
    def apply(model: Model) -> None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrap(block)

    return apply


def _compose(model: Model) -> None:
    for block in model.blocks:
        composable(block)


def _compose_inside(model: Model) -> None:
    for block in model.blocks:
        composable(block.up)


def _wrap_inside(model: Model) -> None:
    for block in model.blocks:
        block.up = wrappers.checkpoint_wrapper(block.up)


OWNERS: dict[str, Callable[[Model], None]] = {
    "checkpoint_wrapper": _wrap_blocks(wrappers.checkpoint_wrapper),
    "reentrant checkpoint_wrapper": _wrap_blocks(
        lambda block: wrappers.checkpoint_wrapper(
            block, checkpoint_impl=wrappers.CheckpointImpl.REENTRANT
        )
    ),
    "checkpoint_wrapper inside": _wrap_inside,
    "offload_wrapper": _wrap_blocks(wrappers.offload_wrapper),
    "composable": _compose,
    "composable inside": _compose_inside,
}


@pytest.mark.parametrize("kept", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("own", OWNERS.values(), ids=OWNERS.keys())
def test_case_e2_no_module_runs_three_times(
    own: Callable[[Model], None], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module) -> Any:
        loss = model(make_input(requires_grad=True))
        loss.backward()
        return read_outcome(model, [loss])

    wanted = step(make_model())
    model = make_model()
    counts = counted(model)
    own(model)
    with caplog.at_level(logging.WARNING, "rematic"):
        engine = Engine(model, trust=["*"])
    assert "is turned off while rematic is attached" in caplog.text
    assert set(engine.classes.values()) == {"Block"}
    action = Keep() if kept else Recompute()
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    step(model)
    model.zero_grad()
    counts.clear()
    found = step(model)
    found.gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): gradient
        for name, gradient in found.gradients.items()
    }
    assert differences(found, wanted) == []
    assert {name: n for name, n in counts.items() if name.endswith("up")} == {
        f"blocks.{i}.up": 1 if kept else 2 for i in range(3)
    }
    engine.detach()


@pytest.mark.parametrize("own", OWNERS.values(), ids=OWNERS.keys())
def test_it_is_given_back(own: Callable[[Model], None]) -> None:
    model = make_model()
    own(model)
    before = [dict(part.__dict__) for part in model.modules()]
    counts = Counter[int]()
    engine = Engine(model)
    engine.detach()
    after = [dict(part.__dict__) for part in model.modules()]
    assert [a.keys() for a in after] == [b.keys() for b in before]
    for part in model.modules():
        if type(part).__name__ == "Block":
            forward = type(part).forward

            def count(*args: Any, _part: Any = part, _f: Any = forward) -> Any:
                counts[id(_part)] += 1
                return _f(_part, *args)

            part.__dict__["forward"] = count
    if "offload" in str(own) or own is OWNERS["offload_wrapper"]:
        return  # (pins memory, which a machine without an accelerator cannot)
    model(make_input(requires_grad=True)).backward()
    inside = own in (OWNERS["composable inside"], OWNERS["checkpoint_wrapper inside"])
    assert set(counts.values()) == {1 if inside else 2}  # it checkpoints again


@pytest.fixture
def checkpointing() -> Iterator[tuple[nn.Module, Events, rematic.Session]]:
    model, journal = make(LLAMA_EAGER), Events()
    model.activation_checkpointing_enable()
    session = rematic.attach(model, policy="recompute", journal=journal)
    yield model, journal, session
    session.detach()


def test_case_e2_transformers_is_taken_over_and_given_back(
    checkpointing: tuple[nn.Module, Events, rematic.Session],
) -> None:
    model, journal, session = checkpointing
    assert not model.is_activation_checkpointing
    assert (
        differences(run_steps(model, LLAMA_EAGER), run_steps(make(LLAMA_EAGER), LLAMA_EAGER)) == []
    )
    assert [unit.num_forwards for unit in session._engine.units] == [2, 2, 2]
    assert session._engine.ledger.counts.replays.total() == 6
    told = journal.of("notice")
    assert [event["unit"] for event in told if event["kind"] == "taken_over"] == [
        *(["model"] if hasattr(model.model, "gradient_checkpointing") else []),
        *(f"model.layers.{i}" for i in range(3)),
    ]
    session.detach()
    assert model.is_activation_checkpointing


def test_case_a2_checkpointing_that_is_turned_on_later_is_taken_over_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the Trainer of transformers does in `train()`, after everything has been set up."""
    model = make(LLAMA_EAGER)
    session = rematic.attach(model, policy="recompute")
    assert "turned off" not in caplog.text
    model.activation_checkpointing_enable()
    with session.step(torch.zeros(2, 7)):
        assert not model.is_activation_checkpointing
    assert "gradient checkpointing of 'model" in caplog.text
    session.detach()
    assert model.is_activation_checkpointing


def test_what_lies_beside_the_units_keeps_its_owner() -> None:
    model = build_llama("sdpa")
    model.activation_checkpointing_enable()
    engine = Engine(model, ["model.layers.0"])
    flags = [layer.gradient_checkpointing for layer in model.model.layers]
    assert flags == [False, True, True]
    engine.detach()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_an_engine_that_is_refused_takes_nothing() -> None:
    model = build_llama("sdpa")
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="matches none"):
        Engine(model, trust=["nothing"])
    assert model.is_activation_checkpointing


def test_a_checkpoint_around_a_unit_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    wanted = make_model()
    wanted(make_input()).backward()
    counts = counted(model)
    engine = Engine(model)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x).sum()

    forward(make_input()).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), wanted.parameters(), strict=True)
    )
    assert "other saved-tensor hooks are active around it" in caplog.text
    assert max(counts.values()) == 2
    engine.detach()

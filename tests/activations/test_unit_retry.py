"""A unit's forward runs again when memory runs out inside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations import Engine
from rematic.activations.record import Record
from rematic.activations.unit import Unit
from rematic.memory import SimulatedProbe
from tests.activations.blocks import WIDTH, Block, Model, make_input, make_model
from tests.activations.parity import (
    Outcome,
    attached,
    differences,
    read_outcome,
)


class Stateful(Block):
    """Draws random numbers, updates running statistics, counts, fills a list of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        self.sizes.append(len(x))
        out = super().forward(nn.functional.dropout(self.norm(x), 0.5))
        seen.append(out.mean())
        return torch.tanh(out)


class StatefulModel(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x).sum() + torch.stack(seen).sum()


def _stateful_steps(kept: Any, probe: SimulatedProbe) -> tuple[Outcome, Engine, list[Any]]:
    """Two steps; only the forward of the second one is under the probe."""
    torch.manual_seed(0)
    model = StatefulModel(Stateful)
    with attached(model, kept=kept) as engine:
        model(make_input()).backward()
        with probe:
            loss = model(make_input())
        loss.backward()
    state = [(block.calls, block.sizes) for block in model.blocks]
    return read_outcome(model, [loss]), engine, state


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """The last try of a unit collects garbage; what is imported by now is none."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


FAILURES = {"before an op": "fail_at_ops", "after an op": "fail_at_allocations"}


@pytest.mark.parametrize("kind", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("kept", [True, [True, False, True], False], ids=["keep", "mixed", "none"])
def test_a_forward_that_runs_out_of_memory_runs_again_with_the_same_bits(
    kept: Any, kind: str
) -> None:
    """Every position of a forward pass (or every third), with the retry at the op turned off.

    After an op the generator has advanced and the running statistics are updated.
    """
    whole = SimulatedProbe()
    plain, _, state = _stateful_steps(kept, whole)
    last = whole.num_ops if kind == "fail_at_ops" else whole.num_allocations
    recovered = stopped = 0
    positions = range(1, last + 1, 1 if kept else 3)
    for position in positions:
        try:
            found, engine, found_state = _stateful_steps(kept, SimulatedProbe(**{kind: [position]}))
        except torch.OutOfMemoryError:
            stopped += 1  # outside units
            continue
        recovered += 1
        assert sum(unit.num_retries for unit in engine.units) == 1
        assert found_state == state
        assert differences(found, plain) == [], f"wrong after a failure at {position}"
    assert recovered >= 0.6 * len(positions), (recovered, stopped)


@pytest.mark.parametrize("kept", [True, [True, False, False]], ids=["keep", "first held"])
def test_memory_that_runs_out_before_the_forward_begins_is_answered_by_the_unit(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every allocation for the state that is taken down, buffers among it."""
    plain, _, state = _stateful_steps(kept, SimulatedProbe())
    open_record = Unit._open
    probe = SimulatedProbe()

    def open_watched(self: Unit, *args: Any, **kwargs: Any) -> Record:
        if self.num_forwards < 1 or (kept is not True and self.position == 0):
            return open_record(self, *args, **kwargs)  # the first step, or nothing could give way
        with probe:
            return open_record(self, *args, **kwargs)

    monkeypatch.setattr(Unit, "_open", open_watched)
    _stateful_steps(kept, SimulatedProbe())
    last = probe.num_allocations
    assert last >= (9 if kept is True else 6)  # running mean, variance and count of each unit
    for position in range(1, last + 1):
        probe = SimulatedProbe(fail_at_allocations=[position])
        found, engine, found_state = _stateful_steps(kept, SimulatedProbe())
        assert probe.num_ooms == 1
        assert sum(unit.num_retries for unit in engine.units) == 1
        assert found_state == state
        assert differences(found, plain) == [], f"wrong after a failure at {position}"


def test_a_record_that_cannot_be_held_starts_evicted_when_nothing_else_is_left() -> None:
    """The unit alone is larger than the memory there is; without it held it fits."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = torch.tanh(x)
            return self.inner(x)

    model = make_model(Wide, 2)
    x = make_input(1000, requires_grad=True)
    one = x.numel() * x.element_size()
    with attached(model, kept=True) as engine:
        model(x).backward()
        with SimulatedProbe() as probe:
            probe.budget_bytes = 7 * one
            loss = model(x)
            probe.budget_bytes = None
        assert [unit.num_retries for unit in engine.units] == [1, 1]
        loss.backward()
    assert engine.ledger.counts.replays == {"blocks.0": 1, "blocks.1": 1}


def test_a_unit_that_never_fits_runs_once_more_after_there_is_nothing_to_evict() -> None:
    class NeverFits(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"attempt {rematic.replaying()}")

    model = make_model(NeverFits, 2)
    with attached(model, kept=False, trusted=True) as engine:
        for _ in range(2):  # each time held, then not, then once more
            with pytest.raises(torch.OutOfMemoryError, match="attempt False") as caught:
                model(make_input())
            assert caught.traceback[-1].name == "forward", "the place where it failed is known"
        assert [unit.num_retries for unit in engine.units] == [4, 0]
        assert [unit.num_forwards for unit in engine.units] == [6, 0]


def test_an_error_that_is_no_lack_of_memory_is_not_answered() -> None:
    class Fails(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model = make_model(Fails)
    with attached(model) as engine, pytest.raises(RuntimeError, match="illegal memory access"):
        model(make_input())
    assert [unit.num_forwards for unit in engine.units] == [1, 0, 0]
    assert engine.ledger.records() == []


def test_a_unit_that_changed_its_input_is_not_run_again() -> None:
    class ChangesThenFails(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            raise torch.OutOfMemoryError("out of memory")

    model = make_model(ChangesThenFails, 2)
    with attached(model), pytest.raises(torch.OutOfMemoryError):
        model(make_input().clone())

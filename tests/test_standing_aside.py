"""Steps with room to spare: kept units run as they are, and a failure is answered all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations.unit_forward import is_recording
from rematic.memory import SimulatedProbe
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from tests.step_models import different, everything, make_batches, make_tied_model
from tests.test_step_recovery import Faults, with_points

ROOM = 1 << 30
BATCHES = 2 * make_batches()
FIRST_LOOKS = 1
"""Steps that are watched, and in which units are checked; from the next on they stand aside."""


class Training:
    """Micro-batches of equal shape, accumulated; memory runs out somewhere in the last."""

    def __init__(self, *faults: int) -> None:
        self.model, self._faults = make_tied_model(), Faults()
        with_points(self.model, self._faults)
        self._last = list(faults)
        self.recorded: list[tuple[bool, ...]] = []
        """For each micro-batch, whether each block ran under a record; of every attempt."""
        for block in self.model.blocks:
            first = next(m for m in block.modules() if not list(m.children()))
            first.register_forward_hook(lambda *_: self._seen.append(is_recording()))
        self._seen: list[bool] = []

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids)
        loss.backward()
        return loss.detach()

    def plainly(self) -> dict[str, object]:
        torch.manual_seed(9)
        return everything(self.model, [self._step(batch) for batch in BATCHES])

    def attached(self, *, capacity: int | None = ROOM, **options: Any) -> dict[str, object]:
        with SimulatedProbe(capacity) as probe:
            probe.track(self.model.parameters())
            given = {"policy": "keep", "budget": "1GiB", "probe": probe, **options}
            session = rematic.attach(self.model, **given)
            torch.manual_seed(9)
            losses = []
            for i, batch in enumerate(BATCHES):
                if i == len(BATCHES) - 1:
                    self._faults.left = list(self._last)
                self._seen = []
                losses.append(session.run(self._step, batch))
                self.recorded.append(tuple(self._seen))
            assert not self._faults.left
            self.report = session.report()
            self.last = session.last_step
            session.detach()
        return everything(self.model, losses)


def test_kept_units_stand_aside_but_for_the_last() -> None:
    training = Training()
    assert different(training.attached(), Training().plainly()) == []
    assert training.recorded[:FIRST_LOOKS] == [(True, True)] * FIRST_LOOKS
    assert set(training.recorded[FIRST_LOOKS:]) == {(False, True)}
    assert training.last is not None
    assert training.last.peak_source == "start of backward"
    assert training.last.peak_bytes is not None
    assert training.last.peak_bytes > (training.last.before.allocated_bytes or 0)
    forwards = [line.split()[3] for line in training.report.splitlines()[3:5]]
    assert forwards == [str(len(BATCHES))] * 2  # they are counted all the same


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": None},
        {"capacity": 1 << 14},
        {"budget": "16KiB"},
        {"policy": "recompute"},
        {"policy": "offload"},
        {"recipe": Recipe(control=ControlConfig(attempts=1))},  # no second try
        {"recipe": Recipe(policy=PolicyConfig(op_retry="always"))},  # which needs what can go
    ],
    ids=str,
)
def test_records_stay_where_they_may_be_needed(options: dict[str, Any]) -> None:
    training = Training()
    assert different(training.attached(**options), Training().plainly()) == []
    assert set(training.recorded) == {(True, True)}


def test_a_step_that_only_its_caller_could_repeat_keeps_its_records() -> None:
    """`with session.step(...)` has no third answer, so the second must stay."""
    model, seen = make_tied_model(), []
    inner = next(m for m in model.blocks[0].modules() if isinstance(m, nn.Linear))
    inner.register_forward_hook(lambda *_: seen.append(is_recording()))
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=SimulatedProbe(ROOM))
    for batch in BATCHES:
        with session.step(batch):
            model(batch).backward()
    assert seen == [True] * len(BATCHES)
    session.detach()


@pytest.mark.parametrize("faults", [[1], [2], [3], [4], [2, 4], [4, 3], [3, 1]], ids=str)
def test_a_failure_all_the_same_changes_no_bit(faults: list[int]) -> None:
    """In front of each block and behind it in backward; the attempts after it run under records."""
    training = Training(*faults)
    assert different(training.attached(), Training().plainly()) == []
    assert training.recorded[-1][-2:] == (True, True)


def test_calls_outside_of_steps_run_under_records_again() -> None:
    training = Training()
    training.attached()
    model = training.model
    with SimulatedProbe(ROOM) as probe:
        session = rematic.attach(model, policy="keep", budget="1GiB", probe=probe)
        for batch in BATCHES:
            session.run(training._step, batch)
        training._seen = []
        model(BATCHES[0])
    assert training._seen == [True, True]
    session.detach()

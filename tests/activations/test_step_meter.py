"""The meter of a step: its peak, what units keep, and the working set of each phase."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rematic.activations import Engine, OpRetry, StepMeter
from rematic.memory import SimulatedProbe
from rematic.policy import Action, Keep, Offload, Plan, Recompute
from rematic.stash import DiskStash
from tests.activations.blocks import WIDTH, Block, Model, make_input, make_model

ROWS = 1000
ONE = ROWS * WIDTH * 4
"""Bytes of one activation `(ROWS, WIDTH)`."""


def _measured(
    model: Model, *, kept: bool = False, watched: bool = True, action: Action | None = None
) -> tuple[StepMeter, SimulatedProbe, Engine]:
    """The second step of a model, read after every op; the first call of a unit is special."""
    engine = Engine(model)
    action = action or (Keep() if kept else Recompute())
    engine.apply(Plan(actions=(action,) * len(engine.units)))
    x = make_input(ROWS)
    model(x).backward()
    model.zero_grad()
    probe = SimulatedProbe()
    probe.track([*model.parameters(), x])
    parameters = list(model.parameters())
    with probe:
        meter = StepMeter(
            probe.allocated_bytes,
            engine.ledger,
            before_bytes=probe.allocated_bytes(),
            gradient_bytes=lambda: sum(4 * p.numel() for p in parameters if p.grad is not None),
            watched=watched,
        )
        engine.ledger.after_forward = meter.at_unit_end
        engine.ledger.after_leaving = meter.after_eviction
        engine.ledger.at_backward = meter.at_backward
        with OpRetry(lambda *_: 0, after_op=meter.read if watched else None):
            model(x).backward()
    engine.detach()
    return meter, probe, engine


def test_a_watched_step_has_the_exact_peak() -> None:
    for kept in (True, False):
        meter, probe, _ = _measured(make_model(), kept=kept)
        assert meter.peak_bytes == probe.peak_allocated_bytes


def test_an_unwatched_step_reads_at_unit_ends() -> None:
    meter, probe, _ = _measured(make_model(), kept=True, watched=False)
    assert meter.before_bytes is not None
    assert meter.peak_bytes is not None
    assert meter.before_bytes < meter.peak_bytes <= probe.peak_allocated_bytes
    phases = [meter.transient_bytes(phase) for phase in ("unit", "head", "backward")]  # type: ignore[arg-type]
    assert phases == [None, None, None]


def test_what_a_unit_keeps_is_what_its_record_holds() -> None:
    meter, _, _ = _measured(make_model(), kept=True)
    assert list(meter.kept.values()) == [ONE] * 3
    meter, _, _ = _measured(make_model(), kept=False)
    assert meter.kept == {}


def test_calls_of_one_unit_add_up() -> None:
    class Twice(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.head(x).sum()

    torch.manual_seed(0)
    meter, _, _ = _measured(Twice(), kept=True)
    assert list(meter.kept.values()) == [2 * ONE] * 3


@pytest.mark.parametrize("depth", [2, 6])
def test_the_working_set_of_a_unit_does_not_grow_with_what_others_keep(depth: int) -> None:
    """Units' inputs, which every record holds, are part of it; what is kept is not."""
    meter, _, _ = _measured(make_model(depth=depth), kept=True)
    inside = meter.transient_bytes("unit")
    assert inside is not None
    # at the last unit: the inputs of the units (the first one's is the caller's), tanh, its
    # argument, and the output of the second linear
    assert inside == (depth - 1) * ONE + 3 * ONE


class WideHead(Model):
    """A head whose logits are larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 100 * WIDTH)


def test_the_head_is_told_apart_from_the_units() -> None:
    torch.manual_seed(0)
    meter, _, _ = _measured(WideHead(), kept=False)
    head, inside = meter.transient_bytes("head"), meter.transient_bytes("unit")
    assert head is not None
    assert inside is not None
    assert inside < 10 * ONE
    assert head > 100 * ONE


def test_what_moves_when_a_unit_ends_is_not_held_while_the_head_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "rematic.activations.stash_places.DiskStash", functools.partial(DiskStash, min_bytes=1)
    )
    torch.manual_seed(0)
    moved, _, _ = _measured(WideHead(), action=Offload())
    recomputed, _, _ = _measured(WideHead(), action=Recompute())
    assert list(moved.kept.values()) == [ONE] * 3
    assert moved.staying_bytes == 0
    assert moved.transient_bytes("head") == recomputed.transient_bytes("head")


def test_gradients_that_appear_are_not_the_working_set_of_backward() -> None:
    class Heavy(Block):
        """Weights far larger than the activations."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(50, ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.table.select(0, 3)

    meter, _, engine = _measured(make_model(Heavy, 4), kept=False)
    backward = meter.transient_bytes("backward")
    assert backward is not None
    one_table = 50 * ONE
    assert backward < 2.5 * one_table, "of one unit: the gradient and what it is made from"
    assert len(engine.units) == 4


def test_a_probe_that_cannot_tell_leaves_everything_unknown() -> None:
    model = make_model()
    engine = Engine(model)
    read: Callable[[], None] = lambda: None  # noqa: E731
    meter = StepMeter(
        read, engine.ledger, before_bytes=None, gradient_bytes=lambda: 0, watched=True
    )
    engine.ledger.after_forward = meter.at_unit_end
    engine.ledger.at_backward = meter.at_backward
    model(make_input()).backward()
    assert meter.read() is None
    assert meter.peak_bytes is None
    assert meter.transient_bytes("head") is None
    engine.detach()

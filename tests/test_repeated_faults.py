"""Memory runs out again and again: in a step, while it is put back, while the next one is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rematic
from rematic import session_step
from rematic.batch_shape import BatchShape, default_batch_shape
from rematic.memory import SimulatedProbe
from rematic.session_step import SessionStep
from rematic.transaction import StepTransaction
from tests.events import Events
from tests.step_models import different, everything, make_batches, make_tied_model

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB."
AT = {"auto": (3, 150), "never": (3, 60, 100, 150, 180, 200)}
"""Ops of the step: of what is taken down before it, of forward, of backward."""


class Run:
    """A step that goes well, and then one in which `fail` is called first."""

    def __init__(
        self,
        fail: Callable[[Run], None] = lambda run: None,
        *,
        clears: bool = True,
        batch_shape: Callable[[object], BatchShape] = default_batch_shape,
        batch: Any = None,
        read: Callable[[Any], torch.Tensor] = lambda batch: batch,
        after: Callable[[Any], None] = lambda batch: None,
        op_retry: str = "auto",
    ) -> None:
        self.model, self.probe, self.journal = make_tied_model(), SimulatedProbe(), Events()
        self.fails_at_end = 0
        session = rematic.attach(
            self.model,
            policy="keep",
            budget="1GiB",
            probe=self.probe,
            journal=self.journal,
            batch_shape=batch_shape,
            recipe={"policy": {"op_retry": op_retry}},
        )

        def step(batch: Any) -> torch.Tensor:
            loss = self.model(read(batch))
            loss.backward()
            after(batch)
            if self.fails_at_end:
                self.fails_at_end -= 1
                raise torch.OutOfMemoryError(MESSAGE)
            return loss.detach()

        first, second = make_batches(2)
        self.error: rematic.StepOutOfMemoryError | None = None
        torch.manual_seed(9)
        with self.probe:
            losses = [session.run(lambda ids: self._plain(ids), first)]
            if clears:
                self.model.zero_grad()
            self.before = everything(self.model, [])
            fail(self)
            try:
                losses.append(session.run(step, second if batch is None else batch))
            except rematic.StepOutOfMemoryError as error:
                self.error = error
            self.probe._failing_ops.clear()
        self.after = everything(self.model, losses if self.error is None else [])
        session.detach()
        assert all(not p._post_accumulate_grad_hooks for p in self.model.parameters())

    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(ids)
        loss.backward()
        return loss.detach()

    def changed(self) -> list[str]:
        """Names what is not as before a step that was given up."""
        return different(self.after, self.before)


def ops_fail(at: int, number: int) -> Callable[[Run], None]:
    def fail(run: Run) -> None:
        first = run.probe.num_ops + 1 + at
        run.probe._failing_ops.update(range(first, first + number))

    return fail


@pytest.mark.parametrize("op_retry", ["auto", "never"])
@pytest.mark.parametrize("number", [5, 40, 2000])
def test_many_ops_in_a_row_end_well_or_in_a_report(number: int, op_retry: str) -> None:
    """Where none goes well any more, what was taken down before the step is still put back."""
    wanted, seen = Run().after, set()
    for at in AT[op_retry]:
        run = Run(ops_fail(at, number), op_retry=op_retry)
        seen.add(run.error is None)
        if run.error is None:
            assert different(run.after, wanted) == [], at
        else:
            assert run.changed() == [], at
            assert run.error.report.attempts[0].name == "as planned"
    assert seen == ({True, False} if number == 5 else {False})


def test_gradients_of_earlier_micro_batches_are_named_if_they_hold_a_part() -> None:
    run = Run(ops_fail(180, 2000), clears=False)
    assert run.error is not None
    changed = run.changed()
    assert all(name.startswith("gradient of ") for name in changed)
    assert len(changed) == run.error.report.num_torn_gradients > 0


@pytest.mark.parametrize(
    ("home", "name"),
    [
        (SessionStep, "first_attempt"),
        (SessionStep, "reopen"),
        (session_step, "OpenStep"),
        (session_step, "resident_bytes"),
        (StepTransaction, "check"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_memory_that_runs_out_while_the_next_attempt_is_made_is_a_stop(
    home: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Run) -> None:
        run.fails_at_end = 99
        real = getattr(home, name)
        opened = []

        def fails(*args: Any, **kwargs: Any) -> Any:
            opened.append(name)
            if name == "OpenStep" and len(opened) == 1:  # of the step itself
                return real(*args, **kwargs)
            raise torch.OutOfMemoryError(MESSAGE)

        monkeypatch.setattr(home, name, fails)

    run = Run(fail)
    assert run.error is not None
    assert run.changed() == []
    assert run.error.report.attempts[0].name == "as planned"
    if name != "resident_bytes":  # of the figures alone
        obstacle = "memory ran out while another attempt was made ready."
        assert run.error.report.obstacle == obstacle
    assert len(run.journal.of("stop")) == 1


@pytest.mark.parametrize("times", [2, 99])
def test_what_cannot_be_put_back_is_tried_again_and_then_said(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = StepTransaction._put_back_once, [times]

    def fails(transaction: StepTransaction) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError(MESSAGE)
        real(transaction)

    def fail(run: Run) -> None:
        run.fails_at_end = 1
        monkeypatch.setattr(StepTransaction, "_put_back_once", fails)

    run = Run(fail)
    if times == 2:
        assert run.error is None
        assert different(run.after, Run().after) == []
        return
    assert run.error is not None
    assert run.error.report.obstacle is not None
    assert "buffers and generators may not be as before" in run.error.report.obstacle
    assert [name for name in run.changed() if name.startswith("gradient")] == []


def test_a_batch_whose_shape_cannot_be_read_for_lack_of_memory_is_run() -> None:
    calls = []

    def shape(batch: object) -> BatchShape:
        calls.append(batch)
        if len(calls) > 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return default_batch_shape(batch)

    run = Run(batch_shape=shape)
    assert run.error is None
    assert len(calls) == 3
    assert different(run.after, Run().after) == []


@pytest.mark.parametrize("clears", [True, False], ids=["", "after another micro-batch"])
def test_a_step_that_cannot_be_repeated_is_put_back_all_the_same(clears: bool) -> None:
    """Its batch is an iterator, or a large tensor of it was changed: nobody shall train on it."""

    def fail(run: Run) -> None:
        run.fails_at_end = 1

    def from_iterator(source: Any) -> torch.Tensor:
        ids: torch.Tensor = next(source)
        return ids

    (ids,) = make_batches(1)
    given = {"ids": ids, "large": torch.zeros(300, 300)}
    runs = [
        Run(fail, batch=iter([ids]), read=from_iterator, clears=clears),
        Run(
            fail,
            batch=given,
            read=lambda batch: batch["ids"],
            after=lambda batch: batch["large"].add_(1),
            clears=clears,
        ),
    ]
    for run in runs:
        assert run.error is not None
        changed = run.changed()
        assert len(changed) == run.error.report.num_torn_gradients
        assert all(name.startswith("gradient of ") for name in changed)
        assert (changed == []) is clears
        assert len(run.error.report.attempts) == 1


@pytest.mark.parametrize("op_retry", ["never", "always"])
def test_gradients_in_one_buffer_stay_there(op_retry: str) -> None:
    """As some optimizers lay them out: views that share one version."""

    def run(failures: int) -> list[float]:
        model = make_tied_model()
        parameters = list(model.parameters())
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(
            parameters, buffer.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = view.view_as(parameter)
        recipe = {"policy": {"op_retry": op_retry}}
        session = rematic.attach(model, policy="keep", budget="1GiB", recipe=recipe)
        left = [0]

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = model(ids)
            loss.backward()
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError(MESSAGE)
            return loss.detach()

        torch.manual_seed(9)
        for batch in make_batches():
            session.run(step, batch)
            left[0] = failures
        session.detach()
        return buffer.tolist()

    assert run(failures=2) == run(failures=0)


@pytest.mark.parametrize("times", [1, 9], ids=["recovered", "given up"])
def test_failures_late_in_backward_leave_nothing_to_the_collector(times: int) -> None:
    model, probe, left = make_tied_model(), SimulatedProbe(), [0]

    def fail(gradient: torch.Tensor) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(MESSAGE)

    model.blocks[0].norm.weight.register_hook(fail)
    recipe = {"policy": {"op_retry": "never"}}
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=probe, recipe=recipe)

    def step(ids: torch.Tensor) -> None:
        model(ids).backward()

    (batch,) = make_batches(1)
    alive = []
    gc.collect()
    gc.disable()
    try:
        with probe:
            for _ in range(24):
                left[0] = times
                with contextlib.suppress(rematic.StepOutOfMemoryError):
                    session.run(step, batch)
                left[0] = 0
                model.zero_grad()
                tensors = sum(type(found) is torch.Tensor for found in gc.get_objects())
                alive.append((tensors, probe.allocated_bytes()))
    finally:
        gc.enable()
        session.detach()
    assert alive[-1] == alive[10]

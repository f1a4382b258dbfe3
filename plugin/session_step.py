"""One step of a session: how it opens, what a recovery asks of it, and the one of `session.run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rematic import control
from rematic.activations import Ledger, PartsMode
from rematic.at_stop import end_training
from rematic.batch_shape import BatchShape
from rematic.control import (
    FailedAttempt,
    FirstAttempt,
    Rung,
    StepDecision,
    StepRequest,
    StopReport,
)
from rematic.memory import MemorySnapshot, is_out_of_memory
from rematic.open_step import OpenStep
from rematic.policy import Action
from rematic.split_batch import Reduction, batch_statistics, num_sequences, run_in_parts
from rematic.step_comparison import StepComparison
from rematic.step_recovery import run_attempts, with_room
from rematic.torn_step import torn_step_error
from rematic.training_tensors import gradient_bytes, pending_gradient_bytes, resident_bytes
from rematic.transaction import abort_ranks, num_ranks

if TYPE_CHECKING:
    from rematic.session import Session

B = TypeVar("B")
T = TypeVar("T")


class SessionStep:
    """The open step of a session, as its recovery sees it.

    Args:
        session: The session, whose inner parts this file may use.
        max_parts: Into how many parts the batch may be split.
    """

    def __init__(self, session: Session, *, max_parts: int = 1) -> None:
        self._session = session
        self._max_parts = max_parts

    def open(self, batch: object, *, repeatable: bool) -> None:
        """Plans for a micro-batch and starts to watch it.

        Args:
            batch: The micro-batch, read for its shape only.
            repeatable: Whether the caller takes a `recovery` and runs the step again by it.
        """
        session = self._session
        shape = self._shape_of(batch)
        before = session.probe.snapshot()
        repeatable = repeatable and num_ranks() == 1 and session.settings.attempts > 1
        asked = replace(
            self._request(shape, before),
            repeatable=repeatable,
            hole_bytes=before.inactive_split_bytes,
        )
        session._asked = asked
        decision = control.plan_step(session.costs, asked)
        if session._model_planner is not None:
            capacity = before.capacity_bytes if session.probe.kind == "host" else None
            decision = session._model_planner.refine(
                decision, asked, shape, batch, host_capacity_bytes=capacity
            )
        # the last: a batch that could not be read
        armed = decision.armed or session.supervisor.armed or shape.tokens <= 1
        spare = not armed and control.has_spare_room(
            decision,
            in_use_bytes=before.allocated_bytes,
            capacity_bytes=before.capacity_bytes,
            reserve=session.settings.reserve,
        )
        self._open(shape, decision, before, armed=armed, spare=spare)

    def _shape_of(self, batch: object) -> BatchShape:
        try:
            return with_room(lambda: self._session.settings.batch_shape(batch), self.ledger)
        except RuntimeError as error:  # reading a batch is no reason to lose it
            if not is_out_of_memory(error):
                raise
        return BatchShape(batch=1, length=1, padded=False)

    def _open(
        self,
        shape: BatchShape,
        decision: StepDecision,
        before: MemorySnapshot,
        *,
        armed: bool,
        spare: bool,
        parts: PartsMode = "whole",
    ) -> None:
        session = self._session
        session._plan = decision.plan
        session._policies.at_boundary = False
        mode = session.settings.op_retry
        session._step = OpenStep(
            session._engine,
            session.probe,
            decision,
            before=before,
            number=session.num_steps,
            shape=shape,
            agreed=session._policies.agreed(decision.plan),
            armed=mode == "always" or (mode == "auto" and armed),
            spare=spare,
            gradient_bytes=lambda: gradient_bytes(session._parameters),
            write=session.settings.journal.write,
            parts=parts,
        )

    def _request(self, shape: BatchShape, before: MemorySnapshot) -> StepRequest:
        session = self._session
        return StepRequest(
            tokens=shape.tokens,
            length=shape.length,
            unit_classes=tuple(session.unit_classes.values()),
            actions=session._policies.actions,
            in_use_bytes=before.allocated_bytes,
            pending_gradient_bytes=pending_gradient_bytes(session._parameters),
            budget_bytes=control.usable_bytes(session.budget_bytes, before.capacity_bytes),
            reserve=session.settings.reserve,
        )

    def run(self, fn: Callable[[B], T], batch: B, reduction: Reduction | None) -> T:
        """Runs `fn(batch)` as one step, again if memory runs out."""
        session = self._session
        self._max_parts = self.parts_allowed(batch, reduction)
        session.begin_step(batch, repeatable=True)
        recovery = session.recovery(batch, code=fn, max_parts=self._max_parts)

        def attempt(rung: Rung | None) -> Any:  # noqa: ANN401 - what the user's step returns
            if rung is None or rung.num_parts == 1:
                return fn(batch)
            assert reduction is not None
            return run_in_parts(
                fn, batch, num_parts=rung.num_parts, reduction=reduction, model=session.model
            )

        comparison = StepComparison(session, self, recovery)
        try:
            comparison.run_first(attempt)
            result: T = comparison.result if comparison.is_done else run_attempts(recovery, attempt)
        except BaseException as error:
            comparison.close()
            recovery.close()
            session.abort_step(error)
            raise
        comparison.compare(result)
        session.end_step()
        return result

    def parts_allowed(self, batch: object, reduction: Reduction | None) -> int:
        """Returns into how many parts a batch may be split, 1 where it may not."""
        if not self._session.settings.allow_split or reduction is None or num_ranks() > 1:
            return 1
        refused = batch_statistics(self._session.model)
        return 1 if refused is not None else num_sequences(batch)

    @property
    def ledger(self) -> Ledger:
        """The records of the model."""
        return self._session._engine.ledger

    def first_attempt(self) -> FirstAttempt:
        """Returns what failed and what is allowed."""
        session = self._session
        assert session._step is not None
        return FirstAttempt(
            actions=session.plan.actions,
            armed=session._step.armed,
            can_arm=session.settings.op_retry != "never",
            attempts=session.settings.attempts,
            may_tile=session.settings.allow_tile,
            may_compress=session.settings.allow_lossy,
            max_parts=self._max_parts,
        )

    def note_failure(self) -> None:
        """Takes note that memory ran out in the open step, before it is opened again."""
        session = self._session
        step, planner = session._step, session._model_planner
        assert step is not None
        step.num_step_retries += 1
        if planner is not None and not step.armed:
            planner.note_loss(step.decision)

    def reopen(self, actions: tuple[Action | None, ...] | None, *, in_tiles: bool = False) -> None:
        """Opens the step again under a plan; None for the one it had.

        Args:
            actions: Of each unit; None for those of the plan that it had.
            in_tiles: Whether token-wise parts of units run in slices. (Where they may and do not
                yet, they are asked, so that it is known whether that would help.)
        """
        session = self._session
        step = session._close_step()
        try:
            before = session.probe.snapshot()
            request = self._request(step.shape, before)
            request = replace(request, actions=session.plan.actions if actions is None else actions)
            decision = control.plan_step(session._costs, request)
            asks = session.settings.allow_tile and step.num_step_retries > 0
            parts: PartsMode = "sliced" if in_tiles else "asked" if asks else "whole"
            self._open(step.shape, decision, before, armed=True, spare=False, parts=parts)
        except BaseException:
            session._step = step  # for whoever reports that it ends here
            raise
        assert session._step is not None
        session._step.num_step_retries = step.num_step_retries

    def stop_report(
        self, attempts: Sequence[FailedAttempt], obstacle: str | None, num_torn: int
    ) -> StopReport:
        """Returns why the step is given up."""
        session = self._session
        assert session._step is not None
        shape = session._step.shape
        report = StopReport(
            batch=shape.batch,
            length=shape.length,
            budget_bytes=session.budget_bytes,
            attempts=tuple(attempts),
            obstacle=obstacle,
            largest_length=None,
            resident_bytes=(),
            num_torn_gradients=num_torn,
        )
        try:
            return self._with_figures(report, shape)
        except RuntimeError as error:  # not for the sake of figures
            if not is_out_of_memory(error):
                raise
        return report

    def _with_figures(self, report: StopReport, shape: BatchShape) -> StopReport:
        session = self._session
        request = self._request(shape, session.probe.snapshot())
        working = session._costs.working_set(shape.tokens)
        return replace(
            report,
            usable_bytes=request.budget_bytes,
            largest_length=control.largest_length(session._costs, request),
            resident_bytes=resident_bytes(
                session.model, [b.optimizer for b in session._boundaries]
            ),
            advice=control.advise(
                may_tile=session.settings.allow_tile,
                may_compress=session.settings.allow_lossy,
                split_by=None if self._max_parts > 1 else session.split_by,
                head_is_peak=working is not None and working.head_bytes > working.unit_bytes,
            ),
        )

    def give_up(self, report: StopReport) -> StopReport:
        """Ends the step for good: a host saves a checkpoint, and the journal gets the report."""
        session = self._session
        step = session._close_step()
        return end_training(session, report, step=step.number)

    def torn(
        self, optimizer: torch.optim.Optimizer, changed: list[torch.Tensor], error: RuntimeError
    ) -> BaseException:
        """Returns the error for an optimizer that has changed only some parameters."""
        session = self._session
        known = {id(p): name for name, p in session.model.named_parameters()}
        names = [known.get(id(p), f"one of shape {tuple(p.shape)}") for p in changed]
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        stop = torn_step_error(names, num_parameters=num_parameters)
        session.settings.journal.write(
            {
                "event": "stop",
                "step": session.num_steps,
                "reason": "the optimizer's step was torn",
                "report": str(stop),
                "batch": None,
                "length": None,
                "parameters": names,
                "error": str(error).split("\n")[0],
            }
        )
        abort_ranks()
        return stop

    def arm(self) -> None:
        """Puts the retry at the op in force, unless the recipe turns it off."""
        assert self._session._step is not None
        if self._session.settings.op_retry != "never":
            self._session._step.arm()

    def may_have_token_wise_parts(self) -> bool:
        """Returns whether a part of some unit is known to be token-wise, or none was asked yet."""
        return self._session._engine.may_have_token_wise_parts()

    def joint_units(self) -> list[str]:
        """Returns the units whose forward exchanges tensors with other ranks."""
        return self._session._engine.joint_units()

    def num_updates(self) -> int:
        """Returns how often an optimizer has begun to step."""
        return self._session._num_updates

    def in_use_bytes(self) -> int | None:
        """Returns the bytes in use, None if unknown."""
        return self._session.probe.allocated_bytes()

    def write(self, event: Mapping[str, Any]) -> None:
        """Writes a retry of the step to the journal."""
        self._session.settings.journal.write(
            {"event": "retry", "step": self._session.num_steps, **event}
        )

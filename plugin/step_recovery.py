"""Runs a micro-batch again that ran out of memory, under heavier plans, until it is done.

The smaller answers, at the op and at the unit, have been given by then (contract 5).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from rematic import control
from rematic.activations import Ledger
from rematic.control import FailedAttempt, Rung, StopReport
from rematic.memory import is_out_of_memory
from rematic.policy import Action
from rematic.step_failure import Failure, read_failure
from rematic.transaction import (
    DataParallelStep,
    ForeignCollectives,
    RestoreError,
    StepTransaction,
    abort_ranks,
    num_ranks,
    release_attempt,
)

T = TypeVar("T")
_log = logging.getLogger("rematic")
_NO_ROOM = "memory ran out while another attempt was made ready."
_NOT_PUT_BACK = (
    "memory ran out while what the step had changed was put back, so buffers and generators may "
    "not be as before. Go on from the last checkpoint."
)


class StepOutOfMemoryError(torch.OutOfMemoryError):
    """A micro-batch that fits in no way that is allowed; model and gradients are as before it.

    It has one argument, a text with the words by which `accelerate.find_executable_batch_size`
    recognises that a smaller batch may help.
    """

    report: StopReport
    """What was tried, and what would fit."""


class RecoverableStep(Protocol):
    """What a recovery asks of the session whose step it repeats."""

    @property
    def ledger(self) -> Ledger:
        """The records of the model."""

    def first_attempt(self) -> control.FirstAttempt:
        """Returns what failed and what is allowed."""

    def note_failure(self) -> None:
        """Takes note that memory ran out in the open step."""

    def reopen(self, actions: tuple[Action, ...] | None, *, in_tiles: bool = False) -> None:
        """Opens the step again; see `SessionStep.reopen`."""

    def may_have_token_wise_parts(self) -> bool:
        """Returns whether a part of some unit is known to be token-wise, or none was asked yet."""

    def stop_report(
        self, attempts: Sequence[FailedAttempt], obstacle: str | None, num_torn: int
    ) -> StopReport:
        """Returns why the step is given up."""

    def give_up(self, report: StopReport) -> StopReport:
        """Ends the step for good; returns the report with what was saved."""

    def arm(self) -> None:
        """Puts the retry at the op in force, if that is allowed."""

    def joint_units(self) -> list[str]:
        """Returns the units whose forward exchanges tensors with other ranks."""

    def num_updates(self) -> int:
        """Returns how often an optimizer has begun to step."""

    def in_use_bytes(self) -> int | None:
        """Returns the bytes in use, None if unknown."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Writes to the journal."""


class StepRecovery:
    """One micro-batch while it is tried.

    Args:
        step: The session, with the step open.
        transaction: What an attempt can change, as it was before the first one; None if there was
            no room to take it down, when only stopping is left.
        data_parallel: What other ranks have seen of the step, None without a wrapper.
        obstacle: Why it can never be repeated, None if it can.
    """

    def __init__(
        self,
        step: RecoverableStep,
        transaction: StepTransaction | None,
        *,
        data_parallel: DataParallelStep | None = None,
        obstacle: str | None = None,
    ) -> None:
        self.rung: Rung | None = None
        """How the present attempt runs, None for the first one."""
        self.transaction = transaction
        self._data_parallel = data_parallel
        self._never = obstacle
        self._step = step
        self._num_updates = step.num_updates()
        self._first: control.FirstAttempt | None = None
        self._rungs: list[Rung] = []
        self._attempts: list[FailedAttempt] = []

    def note(self, error: BaseException, *losses: torch.Tensor | None) -> Failure | None:
        """Reads and frees a failed attempt; to be called while the error is handled.

        Args:
            error: What the attempt raised.
            losses: Results of the attempt that callers still hold.

        Returns:
            The failure, to be given to `answer` when the `except` block has been left; None if
            memory did not run out.
        """
        if not is_out_of_memory(error):
            self._tell_of(error)
            return None
        failure = read_failure(error, self._step.in_use_bytes())
        release_attempt(error, *losses)
        return failure

    def _tell_of(self, error: BaseException) -> None:
        if self.rung is not None and isinstance(error, Exception):
            _log.warning(
                "the step was repeated (%s) since memory had run out in it, and has now raised %s. "
                "If it changes what lies outside of the model and the batch (a scaler whose "
                "`unscale_` it calls, a queue), move that behind it: what cannot be put back must "
                "not lie inside.",
                self.rung.name,
                type(error).__name__,
            )

    def answer(self, failure: Failure, *, obstacle: str | None = None) -> Rung:
        """Puts everything back and makes ready for another attempt.

        Args:
            failure: What `note` returned.
            obstacle: Why a host cannot run the step again, None if it can.

        Returns:
            How the next attempt is to run.

        Raises:
            StepOutOfMemoryError: If there is none, or memory runs out while this is done.
        """
        try:
            return self._answer(failure, obstacle)
        except RuntimeError as error:
            if isinstance(error, StepOutOfMemoryError) or not is_out_of_memory(error):
                raise
            release_attempt(error)
        # outside `except`, so that nothing of it is alive
        self._stop(_NO_ROOM)
        raise AssertionError("a stop raises")

    def _answer(self, failure: Failure, obstacle: str | None) -> Rung:
        self._step.note_failure()
        self._step.ledger.evict(1 << 62)  # what a loss that someone holds keeps alive
        _release_cached_blocks()
        name = "as planned" if self.rung is None else self.rung.name
        self._attempts.append(
            FailedAttempt(
                name=name,
                needed_bytes=failure.needed_bytes,
                error=failure.error,
                where=failure.where,
            )
        )
        if self._first is None:
            self._first = self._step.first_attempt()
            self._rungs = list(control.escalate(self._first))
        if self._rungs and self._rungs[0].in_tiles and not self._step.may_have_token_wise_parts():
            del self._rungs[0]  # it would run as the last one did
        obstacle = self._obstacle() or obstacle
        if obstacle is not None or not self._rungs:
            self._stop(obstacle)
        return self._climb()

    @property
    def collectives(self) -> ForeignCollectives | None:
        """Where a host answers for what it exchanges between ranks; None for one rank."""
        return None if self._data_parallel is None else self._data_parallel.collectives

    def commit(self) -> None:
        """Ends a micro-batch that is done."""
        if self._data_parallel is not None:
            self._data_parallel.close()
        if self.transaction is not None:
            self.transaction.commit()

    def put_back(self) -> None:
        """Makes everything as before the micro-batch, unless something cannot be put back."""
        if self.transaction is not None and self._obstacle() is None:
            self.transaction.give_up()

    def close(self) -> None:
        """Ends it in any other way; safe to call twice."""
        if self._data_parallel is not None:
            self._data_parallel.close()
        if self.transaction is not None:
            self.transaction.close()

    def is_foreseen_to_stop(self) -> bool:
        """Returns whether the step can be repeated in no case, so that the op is the last answer.

        (A wrapper's step could, as long as memory runs out before its forward.)
        """
        if self._data_parallel is not None and self._data_parallel.foreseen_obstacle() is not None:
            return True
        return self._lasting_obstacle() is not None

    def _lasting_obstacle(self) -> str | None:
        joint = self._step.joint_units()
        if joint:
            return f"{joint[0]} exchanges tensors with other ranks, which do not run it again."
        return self._never

    def _obstacle(self) -> str | None:
        lasting = self._lasting_obstacle()
        if lasting is not None:
            return lasting
        if self._data_parallel is not None and self._data_parallel.obstacle() is not None:
            return self._data_parallel.obstacle()
        if self.transaction is None:
            return "there was no room for what a second attempt would have to put back."
        if self._step.num_updates() != self._num_updates:
            return "an optimizer has stepped inside the step. Step it after the step."
        try:
            self.transaction.check(
                in_parts=bool(self._rungs) and self._rungs[0].num_parts > 1,
                with_gradients=self._data_parallel is None or not self._data_parallel.is_reducing,
            )
        except RestoreError as error:
            return str(error)
        return None

    def _may_put_back(self, transaction: StepTransaction) -> bool:
        """Returns whether the state before the step still belongs to the weights.

        (Among ranks, gradients may be on their way to others.)
        """
        return (
            self._data_parallel is None
            and num_ranks() == 1
            and self._step.num_updates() == self._num_updates
            and not transaction.changed_parameters()
        )

    def _climb(self) -> Rung:
        assert self._first is not None
        assert self.transaction is not None
        self.rung = rung = self._rungs.pop(0)
        if self._data_parallel is not None:
            self._data_parallel.undo()
        elif rung.num_parts > 1:
            self.transaction.undo_for_parts()
        else:
            self.transaction.undo()
        every = None if rung.action is None else (rung.action,) * len(self._first.actions)
        self._step.reopen(every, in_tiles=rung.in_tiles)
        failed = self._attempts[-1]
        self._step.write(
            {
                "level": "step",
                "where": failed.where,
                "failed": failed.name,
                "needed_bytes": failed.needed_bytes,
                "next": rung.name,
                "lossy": rung.is_lossy,
            }
        )
        return rung

    def _stop(self, obstacle: str | None) -> None:
        num_torn = 0
        if self.transaction is not None and self._may_put_back(self.transaction):
            try:
                self.transaction.give_up()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                release_attempt(error)
                obstacle = _NOT_PUT_BACK
            num_torn = self.transaction.num_torn
        self.close()
        report = self._step.stop_report(self._attempts, obstacle, num_torn)
        try:
            report = self._step.give_up(report)
        finally:  # an interrupt while the training is saved as well
            abort_ranks()
        raise stop_error(report)


def stop_error(report: StopReport) -> StepOutOfMemoryError:
    """Returns the error with which a training ends."""
    error = StepOutOfMemoryError(control.format_stop(report))
    error.report = report
    return error


def with_room(make: Callable[[], T], ledger: Ledger) -> T:
    """Returns what `make` returns, evicting every record if memory runs out in it."""
    try:
        return make()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        release_attempt(error)
    ledger.evict(1 << 62)
    return make()


def run_attempts(
    recovery: StepRecovery,
    attempt: Callable[[Rung | None], Any],
    *,
    commits: bool = True,
    obstacle: Callable[[], str | None] | None = None,
) -> Any:  # noqa: ANN401 - what the user's step returns
    """Runs `attempt` until it succeeds or nothing is left to try.

    Errors other than running out of memory pass.

    Args:
        recovery: The recovery of the open step.
        attempt: Runs the step.
        commits: Whether success ends the micro-batch; without it the attempt can still be undone.
        obstacle: Returns why a host cannot run the step again, None if it can; asked when one has
            failed.
    """
    while True:
        try:
            result = attempt(recovery.rung)
        except BaseException as error:
            failure = recovery.note(error)
            if failure is None:
                recovery.close()
                raise
        else:
            if commits:
                recovery.commit()
            return result
        # outside `except`: the failed attempt is freed before the next one begins
        recovery.answer(failure, obstacle=None if obstacle is None else obstacle())


def _release_cached_blocks() -> None:
    # blocks of other sizes than the next plan asks for
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

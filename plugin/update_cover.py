"""Covers updates: what is done to gradients between micro-batches, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from rematic.at_stop import end_training
from rematic.control import FailedAttempt, StopReport
from rematic.memory import is_out_of_memory
from rematic.optimizer_boundary import OptimizerGuard
from rematic.optimizer_relief import optimizer_bytes, retry_of_update
from rematic.step_failure import read_failure
from rematic.step_recovery import StepOutOfMemoryError, stop_error
from rematic.training_tensors import resident_bytes
from rematic.transaction import abort_ranks, sharding_obstacle

if TYPE_CHECKING:
    from rematic.session import Session

T = TypeVar("T")
_OBSTACLE = "it lies outside of forward, loss and backward, where ops are run again at most."
_ADVICE = (
    "Take a smaller budget for activations, so that more stays free behind them, or cover ops "
    "between micro-batches on every step (`policy: {op_retry: always}`)."
)
_NAME = "what lies between micro-batches"
_TOLD = "_rematic_told"


class UpdateCover:
    """Lets failed ops of updates run again, unless there is room to spare.

    Args:
        session: The session, whose inner parts this file may use.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_running = False
        self._known: tuple[int, int] | None = None
        """Number of optimizers, and the bytes of their parameters, when these were counted."""

    def guard(self, optimizer: torch.optim.Optimizer) -> OptimizerGuard:
        """Returns the context of an optimizer's step, which has begun."""
        session = self._session
        session._num_updates += 1
        step, last = session._step, session.last_step
        before = last.after if last is not None and step is None else None
        retry = retry_of_update(
            lambda: optimizer_bytes(optimizer), session._engine.ledger, session.settings, before
        )
        return OptimizerGuard(retry, None if step is None else step.meter)

    def failed(self, error: RuntimeError) -> BaseException | None:
        """Returns the error for an optimizer that found no memory and has changed nothing.

        None inside of an open step, which answers it.
        """
        if self._session._step is not None or isinstance(error, StepOutOfMemoryError):
            return None
        return stop_outside(self._session, error, name="the optimizer's step")

    def run(self, work: Callable[[], T]) -> T:
        """Runs what is done to gradients before an optimizer steps.

        Raises:
            StepOutOfMemoryError: If that does not help.
        """
        session = self._session
        if session._step is not None or self._is_running:
            return work()  # of a step that is repeated as a whole, or of other such work
        last = session.last_step
        before = None if last is None else last.after
        retry = retry_of_update(self._bytes, session._engine.ledger, session.settings, before)
        if retry is not None and sharding_obstacle(session.model) is not None:
            retry = None  # norms of shards are exchanged, which one rank must not do again
        self._is_running = True
        try:
            if retry is None:
                return work()
            with retry:
                return work()
        except RuntimeError as error:
            if not is_out_of_memory(error) or isinstance(error, StepOutOfMemoryError):
                raise
            stop = stop_outside(session, error, name="clipping or unscaling gradients")
        finally:
            self._is_running = False
        abort_ranks()
        raise stop

    def _bytes(self) -> int:
        boundaries = self._session._boundaries
        if self._known is None or self._known[0] != len(boundaries):
            found = optimizer_bytes(*(boundary.optimizer for boundary in boundaries))
            self._known = len(boundaries), found
        return self._known[1]


def stop_outside(
    session: Session, error: BaseException, *, name: str = _NAME, unfinished: str | None = None
) -> StepOutOfMemoryError:
    """Ends a training in which memory ran out where nothing is run again.

    Args:
        session: The session, whose inner parts this function may use; an open step is given up.
        error: What was raised.
        name: What was running.
        unfinished: Why the training must not be saved as it is, None if it can.

    Returns:
        The error with which it ends, after everything that can be saved was.
    """
    step = session._step
    number = session.num_steps if step is None else step.number
    if step is not None:
        session._close_step()
    failure = read_failure(error, session.probe.allocated_bytes())
    report = StopReport(
        batch=None,
        length=None,
        budget_bytes=session.budget_bytes,
        attempts=(FailedAttempt(name=name, **vars(failure)),),
        obstacle=_OBSTACLE,
        largest_length=None,
        resident_bytes=resident_bytes(session.model, [b.optimizer for b in session._boundaries]),
        not_saved=unfinished,
        advice=(_ADVICE,),
    )
    return stop_error(end_training(session, report, step=number))


def is_untold(error: BaseException) -> bool:
    """Returns whether memory ran out and nobody has told of it yet."""
    is_told = isinstance(error, StepOutOfMemoryError) or hasattr(error, _TOLD)
    return is_out_of_memory(error) and not is_told


def note_told(error: BaseException) -> None:
    """Takes note, on the error itself, that it was told of: who kept it would keep its frames."""
    setattr(error, _TOLD, True)

"""Runs one batch of a probation under the previous policy too, and compares what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rematic.control import policy_in_history, relative_difference
from rematic.gradient_sample import GradientSample
from rematic.memory import is_out_of_memory
from rematic.policy import Action, lossless, resolve
from rematic.step_recovery import StepRecovery, run_attempts
from rematic.transaction import RestoreError, num_ranks

if TYPE_CHECKING:
    from rematic.control import Comparison, Rung
    from rematic.session import Session
    from rematic.session_step import SessionStep

Attempt = Callable[["Rung | None"], Any]


class StepComparison:
    """The first run of a micro-batch that is run twice: under the previous policy.

    What that policy would compress is recomputed, so that its gradients are right. Gradients,
    generators, buffers and state are put back afterwards. Where they cannot be, or where memory ran
    out on the way, that run is the step, and nothing is compared.

    Args:
        session: The session, whose inner parts this file may use.
        step: Its open step.
        recovery: Its recovery.
    """

    def __init__(self, session: Session, step: SessionStep, recovery: StepRecovery) -> None:
        self._session = session
        self._step = step
        self._recovery = recovery
        self.is_done = False
        """Whether the first run stands for the step."""
        self.result: Any = None
        """What it returned."""
        self._due: Comparison | None = None
        self._planned: tuple[Action, ...] = ()
        self._first: GradientSample | None = None
        self._second: GradientSample | None = None

    def begin(self) -> bool:
        """Opens the step under the previous policy; returns whether it is to be compared."""
        if self._recovery.transaction is None or num_ranks() > 1:
            return False
        session = self._session
        self._due = due = session.supervisor.begin_comparison(tokens=_tokens(session))
        previous = None if due is None else policy_in_history(session.history, due.policy)
        if previous is None:
            return False
        self._planned = session.plan.actions
        self._step.reopen(resolve(lossless(previous), session.unit_classes))
        self._first = GradientSample(self._session.model.parameters())
        return True

    @property
    def is_running(self) -> bool:
        """Whether the first of two runs is under way."""
        return self._first is not None and self._second is None

    def turn(self, result: Any) -> bool:  # noqa: ANN401 - what the user's step returns
        """Puts everything back behind the first run and opens the step under the policy in force.

        Args:
            result: What the first run returned.

        Returns:
            Whether the batch is to be run again; if not, the first run stands for the step.
        """
        assert self._first is not None
        self._first.close()
        self.result = result
        self.is_done = self._recovery.rung is not None or not self._put_back()
        if not self.is_done:
            self._step.reopen(self._planned)
            self._second = GradientSample(self._session.model.parameters())
        return not self.is_done

    def run_first(self, attempt: Attempt) -> None:
        """Runs the batch under the previous policy, if one is to be compared with."""
        if not self.begin():
            return
        # not committed, or its gradients could not be taken back
        if not self.turn(run_attempts(self._recovery, attempt, commits=False)):
            self._recovery.commit()

    def compare(self, result: Any) -> None:  # noqa: ANN401 - what the user's step returns
        """Tells the supervisor how far the second run is from the first.

        Not where memory ran out in it: then it ran under another plan than the policy's.
        """
        first, second = self._first, self._second
        self.close()
        if first is None or second is None or self._recovery.rung is not None:
            return
        assert self._due is not None
        try:
            before, after = _number(self.result), _number(result)
            gradients = second.difference_from(first)
        except RuntimeError as error:  # the step itself went well
            if not is_out_of_memory(error):
                raise
            return
        found = {"gradient_difference": gradients.difference}
        if before is not None and after is not None:
            found["loss_difference"] = relative_difference(before, after)
        self._session.supervisor.end_comparison(found)
        self._session.settings.journal.write(
            {
                "event": "compare",
                "step": self._session.num_steps,
                **self._due._asdict(),
                "loss": after,
                "previous_loss": before,
                "difference": found.get("loss_difference"),
                "gradient_norm": gradients.norm,
                "previous_gradient_norm": gradients.previous_norm,
                "gradient_cosine": gradients.cosine,
                "gradient_difference": gradients.difference,
            }
        )

    def close(self) -> None:
        """Leaves nothing on the parameters; safe to call at any time."""
        if self.is_running:  # there was no second run
            self._session.supervisor.note_comparison("first run stands")
        for sample in (self._first, self._second):
            if sample is not None:
                sample.close()
        self._first = self._second = None

    def _put_back(self) -> bool:
        assert self._recovery.transaction is not None
        try:
            self._recovery.transaction.check()
        except RestoreError:
            return False
        self._recovery.transaction.undo()
        return True


def _tokens(session: Session) -> int:
    step = session._step
    return 0 if step is None else step.shape.tokens


def _number(result: object) -> float | None:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    return float(result) if isinstance(result, (int, float)) else None

"""Runs one batch of a probation under the previous policy too, and compares the losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rematic.control import policy_in_history
from rematic.policy import Action, resolve
from rematic.step_recovery import StepRecovery, run_attempts
from rematic.transaction import RestoreError, num_ranks

if TYPE_CHECKING:
    from rematic.control import Rung
    from rematic.session import Session
    from rematic.session_step import SessionStep

LARGEST_DIFFERENCE = 1e9
"""Stands for losses that cannot be compared, such as one that is not a number."""

Attempt = Callable[["Rung | None"], Any]


class LossComparison:
    """The first run of a micro-batch that is run twice: under the previous policy.

    Its gradients, generators, buffers and state are put back afterwards. Where they cannot be, or
    where memory ran out on the way, that run is the step, and nothing is compared.

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
        self._actions = _previous_actions(session)

    def run_first(self, attempt: Attempt) -> None:
        """Runs the batch under the previous policy, if one is to be compared with."""
        if self._actions is None or self._recovery.transaction is None or num_ranks() > 1:
            return
        planned = self._session.plan.actions
        self._step.reopen(self._actions)
        # not committed, or its gradients could not be taken back
        self.result = run_attempts(self._recovery, attempt, commits=False)
        self.is_done = self._recovery.rung is not None or not self._put_back()
        if self.is_done:
            self._recovery.commit()
        else:
            self._step.reopen(planned)

    def compare(self, result: Any) -> None:  # noqa: ANN401 - what the user's step returns
        """Tells the supervisor how far the loss of the second run is from that of the first."""
        if self._actions is None or self.is_done:
            return
        before, after = _number(self.result), _number(result)
        if before is None or after is None:
            return
        difference = _difference(before, after)
        self._session.supervisor.loss_difference = difference
        self._session.settings.journal.write(
            {
                "event": "compare",
                "step": self._session.num_steps,
                "loss": after,
                "previous_loss": before,
                "difference": difference,
            }
        )

    def _put_back(self) -> bool:
        assert self._recovery.transaction is not None
        try:
            self._recovery.transaction.check()
        except RestoreError:
            return False
        self._recovery.transaction.undo()
        return True


def _previous_actions(session: Session) -> tuple[Action | None, ...] | None:
    """Returns what the previous policy says of each unit, None if nothing is to be compared."""
    name = session.supervisor.compared_policy
    policy = None if name is None else policy_in_history(session.history, name)
    return None if policy is None else resolve(policy, session.unit_classes)


def _number(result: object) -> float | None:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    return float(result) if isinstance(result, (int, float)) else None


def _difference(before: float, after: float) -> float:
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    if not (math.isfinite(before) and math.isfinite(after)):
        return LARGEST_DIFFERENCE
    return min(abs(after - before) / max(abs(before), 1e-12), LARGEST_DIFFERENCE)

"""Which batches of a probation are run under the policy before, too. Pure."""

from __future__ import annotations

from typing import NamedTuple

from rematic.control.gates import Trial
from rematic.control.goals import Goals
from rematic.control.observation import ComparisonOutcome

COMPARISONS_MAX = 3
"""Batches in a row that are run under the policy before although they could not be compared."""


class Comparison(NamedTuple):
    """A batch that is to be run under the policy before, too."""

    policy: str
    """The policy before."""
    rule: str
    """Why this batch."""


def comparison_due(
    trial: Trial | None, goals: Goals, *, policy: str, tokens: int
) -> Comparison | None:
    """Returns under which policy a batch is to be run too, None for none.

    One batch of a probation is, and another one that is twice as long as any before it: short ones
    keep too little to tell.

    Args:
        trial: The probation that runs.
        goals: The criteria.
        policy: The policy in force.
        tokens: Of the batch.
    """
    if trial is None or policy != trial.policy:
        return None
    if goals.loss_tolerance is None and goals.gradient_tolerance is None:
        return None
    if trial.num_failed_comparisons >= COMPARISONS_MAX:  # it cannot be done, as it seems
        return None
    longest = trial.compared_tokens
    if not longest:
        return Comparison(trial.previous, f"no batch under {policy} was compared yet")
    if tokens < 2 * longest:
        return None
    return Comparison(trial.previous, f"twice as long as the longest one compared ({longest:,})")


def after_comparison(trial: Trial, outcome: ComparisonOutcome, *, tokens: int) -> Trial:
    """Returns the probation after a batch that was to be run twice."""
    if outcome == "compared":
        return trial._replace(compared_tokens=tokens, num_failed_comparisons=0)
    return trial._replace(num_failed_comparisons=trial.num_failed_comparisons + 1)

"""The criteria that a change of policy must meet within its probation. Pure.

Each gate is a formula over the steps of the probation, with a baseline where it compares. A gate
whose numbers do not exist (no statistics, no length in common) is not judged, and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rematic.control.goals import Goals
from rematic.control.samples import (
    Sample,
    Samples,
    of_policy,
    relief,
    slowdown,
    slowdown_of_keep,
)

RELIEF_MIN = 0.01
"""A policy taken for want of memory must need less than the one before it by this share."""

NOISE_SECONDS = 0.01
"""Steps that take less are not judged by their time: a busy machine doubles it by chance."""


class Gate(NamedTuple):
    """One criterion, as it was judged."""

    name: str
    """Which one."""
    unit: str
    """Of the three numbers."""
    measured: float | None
    """What the probation gave."""
    baseline: float | None
    """What the previous policy gave, None where nothing is compared."""
    bound: float | None
    """What it must not pass."""
    passed: bool | None
    """Whether it was met; None if it could not be judged."""


class Trial(NamedTuple):
    """A policy on probation."""

    policy: str
    """The policy."""
    previous: str
    """The one it replaced, which comes back if a gate fails."""
    for_memory: bool
    """Whether the controller took it because memory was short."""
    failures_before: int
    """Failed allocations under the previous policy, in as many steps as a probation has."""
    samples: tuple[Sample, ...] = ()
    """Its steps so far."""
    loss_difference: float | None = None
    """Relative difference of one batch's losses, None if none was run under both policies."""
    gradient_difference: float | None = None
    """The same of its gradients."""
    compared_tokens: int = 0
    """Tokens of the longest batch that was run under both policies; 0 for none."""
    num_failed_comparisons: int = 0
    """Batches in a row that were to be and could not be compared."""


def begun_again(trial: Trial) -> Trial:
    """Returns the probation as it begins, without what it has shown."""
    return Trial(trial.policy, trial.previous, trial.for_memory, trial.failures_before)


def judge(trial: Trial, samples: Samples, goals: Goals) -> tuple[Gate, ...]:
    """Returns every gate of a probation.

    Args:
        trial: The probation.
        samples: Steps under the previous policy.
        goals: The criteria.
    """
    settled = trial.samples[1:] or trial.samples  # the first step under a policy also sets it up
    return (
        *early_gates(trial, goals),
        _headroom(trial, samples, goals),
        _slowdown(settled, trial, samples, goals),
        _throughput(settled, goals),
        _relief(trial, samples),
    )


def early_gates(trial: Trial, goals: Goals) -> tuple[Gate, ...]:
    """Returns the gates that need no more steps to fail once they have failed."""
    return (
        _ooms(trial, goals),
        _compared("loss", trial.loss_difference, goals.loss_tolerance),
        _compared("gradient", trial.gradient_difference, goals.gradient_tolerance),
    )


def _ooms(trial: Trial, goals: Goals) -> Gate:
    found = sum(sample.num_failures for sample in trial.samples)
    bound = max(goals.ooms_max, trial.failures_before)
    return Gate("ooms", "count", found, trial.failures_before, bound, found <= bound)


def _headroom(trial: Trial, samples: Samples, goals: Goals) -> Gate:
    found = _least_headroom(trial.samples)
    before = _least_headroom(of_policy(samples, trial.previous))
    # going back to a policy that leaves even less would help nobody
    bound = goals.headroom_min if before is None else min(goals.headroom_min, before)
    passed = None if found is None else found >= bound
    return Gate("headroom", "share of the limit", found, before, bound, passed)


def _least_headroom(samples: Sequence[Sample]) -> float | None:
    return min((s.headroom for s in samples if s.headroom is not None), default=None)


def _slowdown(settled: Sequence[Sample], trial: Trial, samples: Samples, goals: Goals) -> Gate:
    unit, pair = "seconds per token, the planner's as baseline", slowdown_of_keep(settled)
    if pair is None:
        unit, pair = "seconds per token", slowdown(settled, samples, trial.previous)
    if pair is None:
        return Gate("slowdown", unit, None, None, None, None)
    found, before = pair
    bound = goals.slowdown_max * before
    is_noise = statistics.median(sample.seconds for sample in settled) < NOISE_SECONDS
    passed = None if is_noise else found <= bound
    return Gate("slowdown", unit, found, before, bound, passed)


def _throughput(settled: Sequence[Sample], goals: Goals) -> Gate:
    rates = [sample.tokens / sample.seconds for sample in settled if sample.seconds > 0]
    found = statistics.median(rates) if rates else None
    bound = goals.throughput_min
    passed = None if bound is None or found is None else found >= bound
    return Gate("throughput", "tokens per second", found, None, bound, passed)


def _relief(trial: Trial, samples: Samples) -> Gate:
    pair = relief(trial.samples, samples, trial.previous) if trial.for_memory else None
    if pair is None:
        return Gate("relief", "bytes", None, None, None, None)
    found, before = pair
    bound = (1 - RELIEF_MIN) * before
    return Gate("relief", "bytes", found, before, bound, found <= bound)


def _compared(name: str, found: float | None, bound: float | None) -> Gate:
    passed = None if found is None or bound is None else found <= bound
    return Gate(name, "relative difference", found, None, bound, passed)


def failed(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Returns the gates that were not met."""
    return tuple(gate for gate in gates if gate.passed is False)

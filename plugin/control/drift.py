"""Whether the steps under a policy still look as they did when it came into force. Pure.

What a policy was judged by may change under it: lengths grow, predictions miss, allocations begin
to fail. Its steps are therefore taken together in stretches, and each stretch is compared with the
first one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rematic.control.gates import Gate
from rematic.control.observation import Observation

STRETCH_STEPS = 64
"""Steps of a stretch."""

LENGTH_FACTOR = 2.0
"""Lengths have drifted if their mean is so many times the baseline's, or so small a part of it."""

ERROR_FACTOR = 2.0
ERROR_SHARE = 0.1
"""Predictions have drifted if their mean error is above both: twice the baseline's, and a tenth."""

RETRY_FACTOR = 2.0
RETRIES_MIN = 4
"""Failed allocations have drifted if they are above both: twice the baseline's, and so many."""


class Stretch(NamedTuple):
    """Some steps taken together."""

    num_steps: int = 0
    """How many."""
    log_tokens: float = 0.0
    """Sum of the logarithms of their tokens."""
    errors: float = 0.0
    """Sum of |peak / predicted peak - 1| of those that had a prediction."""
    num_predicted: int = 0
    """How many had."""
    num_retries: int = 0
    """Allocations that failed and were answered, by us or by the allocator."""


class Drift(NamedTuple):
    """The steps under the policy in force."""

    baseline: Stretch | None = None
    """The first stretch; after a drift the one that has drifted."""
    now: Stretch = Stretch()
    """The stretch that is not complete yet."""
    is_wary: bool = False
    """Whether predictions or allocations were worse in the last stretch: steps are armed then."""


def drifted(drift: Drift, seen: Observation, *, num_retries: int) -> tuple[Drift, tuple[Gate, ...]]:
    """Returns the stretches after a step, and the gates if a stretch has ended.

    Args:
        drift: The stretches before.
        seen: The step.
        num_retries: Allocations of the step that failed and were answered.
    """
    n, log_tokens, errors, num_predicted, retries = drift.now
    predicted, peak = seen.predicted_peak_bytes, seen.peak_bytes
    if predicted and peak is not None:
        errors += min(1.0, abs(peak / predicted - 1))
        num_predicted += 1
    log_tokens += math.log(max(seen.tokens, 1))
    now = Stretch(n + 1, log_tokens, errors, num_predicted, retries + num_retries)
    if n + 1 < STRETCH_STEPS:
        return Drift(drift.baseline, now, drift.is_wary), ()
    if drift.baseline is None:
        return Drift(now), ()
    gates = (
        _lengths(now, drift.baseline),
        _predictions(now, drift.baseline),
        _retries(now, drift.baseline),
    )
    failed = {gate.name for gate in gates if gate.passed is False}
    baseline = now if failed else drift.baseline
    return Drift(baseline, is_wary=bool(failed & {"predictions", "retries"})), gates


def _lengths(now: Stretch, baseline: Stretch) -> Gate:
    found = math.exp(now.log_tokens / now.num_steps)
    before = math.exp(baseline.log_tokens / baseline.num_steps)
    if found >= before:
        bound = LENGTH_FACTOR * before
        passed = found <= bound
    else:
        bound = before / LENGTH_FACTOR
        passed = found >= bound
    return Gate("lengths", "tokens", found, before, bound, passed)


def _predictions(now: Stretch, baseline: Stretch) -> Gate:
    found, before = _mean_error(now), _mean_error(baseline)
    if found is None or before is None:
        return Gate("predictions", "share of the prediction", found, before, None, None)
    bound = max(ERROR_SHARE, ERROR_FACTOR * before)
    return Gate("predictions", "share of the prediction", found, before, bound, found <= bound)


def _mean_error(stretch: Stretch) -> float | None:
    return stretch.errors / stretch.num_predicted if stretch.num_predicted else None


def _retries(now: Stretch, baseline: Stretch) -> Gate:
    found, before = now.num_retries, baseline.num_retries
    bound = max(RETRIES_MIN, RETRY_FACTOR * before)
    return Gate("retries", f"count in {STRETCH_STEPS} steps", found, before, bound, found <= bound)

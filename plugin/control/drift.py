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
    """Sum of |peak / predicted peak - 1| of those that tell of their predictions."""
    num_predicted: int = 0
    """How many do."""
    num_retries: int = 0
    """Allocations that failed and were answered, by us or by the allocator."""


class Drift(NamedTuple):
    """The steps under the policy in force; flat, since one is made every step."""

    num_steps: int = 0
    """The stretch that is not complete yet, in the fields of `Stretch`."""
    log_tokens: float = 0.0
    errors: float = 0.0
    num_predicted: int = 0
    num_retries: int = 0
    baseline: Stretch | None = None
    """The first stretch; after a drift the one that has drifted."""
    is_wary: bool = False
    """Whether predictions or allocations were worse in the last stretch: steps are armed then."""


def drifted(drift: Drift, seen: Observation, num_retries: int) -> tuple[Drift, tuple[Gate, ...]]:
    """Returns the stretches after a step, and the gates if a stretch has ended.

    Args:
        drift: The stretches before.
        seen: The step.
        num_retries: Allocations of the step that failed and were answered.
    """
    n, log_tokens, errors, num_predicted, retries, baseline, is_wary = drift
    tokens = seen.tokens
    if seen.prediction_error is not None:
        errors += min(1.0, seen.prediction_error)
        num_predicted += 1
    log_tokens += math.log(tokens) if tokens > 1 else 0.0
    n, retries = n + 1, retries + num_retries
    if n < STRETCH_STEPS:
        return Drift(n, log_tokens, errors, num_predicted, retries, baseline, is_wary), ()
    now = Stretch(n, log_tokens, errors, num_predicted, retries)
    if baseline is None:
        return Drift(baseline=now), ()
    gates = (_lengths(now, baseline), _predictions(now, baseline), _retries(now, baseline))
    missed = {gate.name for gate in gates if gate.passed is False}
    is_wary = bool(missed & {"predictions", "retries"})
    return Drift(baseline=now if missed else baseline, is_wary=is_wary), gates


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

"""A verdict on memory after each step: is it short, in pieces, paged out, or not known? Pure.

Three troubles look alike from outside and want different remedies. Memory that is full wants a
heavier policy; memory in pieces wants its cached blocks released; memory that a driver pages out
instead of failing wants less of it to be used, whatever the allocator claims to have.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rematic.control.observation import Observation

Verdict = Literal["ok", "pressure", "fragmentation", "spill", "unknown"]

FULL_SHARE = 0.97
"""A peak above this share of the limit is pressure; plans leave 5 % of a budget unused."""

CROWDED_SHARE = 0.9
"""An allocator that holds more than this share of the capacity has no room to grow."""

HOLES_SHARE = 0.1
"""Holes above this share of what the allocator holds are fragmentation, if it is also crowded."""

UNUSED_SHARE = 0.2
"""And if this share of what it holds was in use at no time of the step."""

SLOW_FACTOR = 1.5
"""Over capacity, a step that takes so many times the usual seconds per token is paged out."""

WARM_UP_STEPS = 5
"""Retries of the allocator in the first steps are ignored: it is still growing."""

TREND_STEPS = 3
"""Retries in so many steps in a row are a trend; fewer are not."""

REMEDIES: dict[Verdict, str] = {
    "ok": "none",
    "unknown": "none: out-of-memory errors are answered, nothing is done ahead of them",
    "pressure": "a heavier policy",
    "fragmentation": "release cached blocks; PYTORCH_ALLOC_CONF=expandable_segments:True",
    "spill": "a heavier policy, or a smaller budget",
}
"""What helps, by verdict."""

Evidence = tuple[tuple[str, float], ...]
"""Names and numbers that a verdict rests on."""


class Risk(NamedTuple):
    """A verdict with its evidence."""

    verdict: Verdict
    """What is wrong, if anything."""

    rule: str
    """The rule that decided."""

    evidence: Evidence = ()
    """The numbers it was applied to; bytes, seconds or counts, as their names say."""


class RiskState(NamedTuple):
    """What is remembered from step to step."""

    num_steps: int = 0
    """Steps assessed."""

    num_alloc_retries: int | None = None
    """The allocator's count after the last step."""

    retry_streak: int = 0
    """Steps in a row in which it rose, warm-up left out."""


OK = Risk("ok", "every figure is within its threshold")
_UNKNOWN = Risk("unknown", "neither the bytes in use nor a limit for them can be read")


def length_bucket(length: int) -> int:
    """Returns the doubling that a length lies in: 9 for 256 to 511."""
    return length.bit_length()


def is_over_capacity(seen: Observation) -> bool:
    """Returns whether more is held than there is, so that the usual speed matters."""
    capacity, reserved, in_use = seen.capacity_bytes, seen.reserved_bytes, seen.in_use_bytes
    return capacity is not None and (
        (reserved is not None and reserved > capacity) or (in_use is not None and in_use > capacity)
    )


def assess(
    state: RiskState, seen: Observation, *, usual_seconds_per_token: float | None = None
) -> tuple[RiskState, Risk]:
    """Returns the state after a step, and the verdict on it.

    Args:
        state: The state before.
        seen: The step.
        usual_seconds_per_token: What steps under the same policy and about as long have taken;
            needed where `is_over_capacity`.
    """
    streak = _retry_streak(state, seen)
    retries = seen.num_alloc_retries
    if retries is None:
        retries = state.num_alloc_retries
    risk = _verdict(seen, streak, usual_seconds_per_token)
    return RiskState(state.num_steps + 1, retries, streak), risk


def _retry_streak(state: RiskState, seen: Observation) -> int:
    now, before = seen.num_alloc_retries, state.num_alloc_retries
    if state.num_steps < WARM_UP_STEPS or now is None or before is None or now <= before:
        return 0
    return state.retry_streak + 1


def _verdict(seen: Observation, streak: int, usual: float | None) -> Risk:
    limit, peak = seen.limit_bytes, seen.peak_bytes
    if limit is None or (peak is None and seen.in_use_bytes is None):
        return _failures(seen) or _UNKNOWN
    spilled = _spill(seen, usual) if usual is not None and is_over_capacity(seen) else None
    return spilled or _fragmentation(seen) or _pressure(seen, limit, peak or 0, streak) or OK


def _spill(seen: Observation, usual: float) -> Risk | None:
    rate = seen.seconds / max(seen.tokens, 1)
    if rate <= SLOW_FACTOR * usual:
        return None
    held = max(seen.in_use_bytes or 0, seen.reserved_bytes or 0)
    return Risk(
        "spill",
        f"more is held than there is, and steps take over {SLOW_FACTOR} times as long as usual",
        (
            ("held_bytes", held),
            ("capacity_bytes", seen.capacity_bytes or 0),
            ("seconds_per_token", rate),
            ("usual_seconds_per_token", usual),
        ),
    )


def _fragmentation(seen: Observation) -> Risk | None:
    capacity, held, holes = seen.capacity_bytes, seen.reserved_bytes, seen.hole_bytes
    if capacity is None or not held or not holes or held <= CROWDED_SHARE * capacity:
        return None
    used = max(seen.peak_bytes or 0, seen.in_use_bytes or 0)
    if holes <= HOLES_SHARE * held or held - used <= UNUSED_SHARE * held:
        return None
    return Risk(
        "fragmentation",
        "the allocator holds nearly all there is, much of it unused and in holes",
        (
            ("reserved_bytes", held),
            ("capacity_bytes", capacity),
            ("highest_used_bytes", used),
            ("inactive_split_bytes", holes),
        ),
    )


def _pressure(seen: Observation, limit: int, peak: int, streak: int) -> Risk | None:
    if peak > FULL_SHARE * limit:
        rule = f"the peak is above {FULL_SHARE:.0%} of the limit"
        return Risk("pressure", rule, (("peak_bytes", peak), ("limit_bytes", limit)))
    failed = _failures(seen)
    if failed is not None:
        return failed
    held, capacity = seen.reserved_bytes, seen.capacity_bytes
    if streak < TREND_STEPS or held is None or capacity is None:
        return None
    if held <= CROWDED_SHARE * capacity:
        return None
    return Risk(
        "pressure",
        f"the allocator had to release its cache in {TREND_STEPS} steps in a row or more",
        (("steps_in_a_row", streak), ("reserved_bytes", held), ("capacity_bytes", capacity)),
    )


def _failures(seen: Observation) -> Risk | None:
    """Returns the verdict on memory that has run out, which needs no statistics."""
    if seen.num_step_retries:  # what the run that fitted has held says nothing of the first one
        return Risk(
            "pressure",
            "the step ran out of memory, and fitted only when it ran again",
            (("step_retries", seen.num_step_retries),),
        )
    if seen.num_failures or seen.evicted_bytes:
        return Risk(
            "pressure",
            "the step fitted only because records were evicted",
            (("evicted_bytes", seen.evicted_bytes), ("failures", seen.num_failures)),
        )
    return None

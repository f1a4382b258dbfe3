"""What steps under each policy took and held, by length: the baselines of gates. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rematic.control.observation import Observation
from rematic.control.risk import length_bucket

MAX_SAMPLES = 8
"""Newest steps that are remembered of a policy and a bucket of lengths."""

SAME_SHARE = 0.1
"""Batches whose tokens differ by no more than this share are as long as each other."""


class Sample(NamedTuple):
    """One step."""

    tokens: int
    """Batch size x length."""
    length: int
    """Tokens of each sequence."""
    seconds: float
    """Time of forward and backward."""
    demand_bytes: int | None
    """Highest bytes in use, with what was evicted."""
    headroom: float | None
    """Share of the limit that was free at the peak."""
    num_failures: int
    """Allocations that failed and were answered."""
    resident_bytes: int
    """Bytes in use between steps, whatever the batch; 0 if unknown."""
    keep_seconds: float | None = None
    """What the planner expected with everything kept; None where it did not know."""


Samples = Mapping[tuple[str, int], tuple[Sample, ...]]
"""The newest samples, oldest first, by policy and `length_bucket`."""


def sample_of(seen: Observation, *, num_failures: int) -> Sample:
    """Returns what is remembered of a step."""
    limit, peak, demand = seen.limit_bytes, seen.peak_bytes, seen.demand_bytes
    if seen.num_step_retries:  # these are of the last run, which had another plan
        peak = demand = None
    headroom = None if not limit or peak is None else (limit - peak) / limit
    return Sample(
        seen.tokens,
        seen.length,
        seen.seconds,
        demand,
        headroom,
        num_failures,
        seen.in_use_bytes or 0,
        seen.keep_seconds,
    )


def with_sample(samples: Samples, policy: str, sample: Sample) -> Samples:
    """Returns the samples with one more; the oldest of its policy and bucket may go."""
    key = (policy, length_bucket(sample.length))
    return {**samples, key: (*samples.get(key, ())[1 - MAX_SAMPLES :], sample)}


def only(samples: Samples, policies: Collection[str]) -> Samples:
    """Returns the samples of some policies."""
    return {key: kept for key, kept in samples.items() if key[0] in policies}


def of_policy(samples: Samples, policy: str) -> list[Sample]:
    """Returns all samples of one policy."""
    return [sample for key, kept in samples.items() if key[0] == policy for sample in kept]


def usual_rate(samples: Samples, policy: str, length: int) -> float | None:
    """Returns the median seconds per token of a policy at such lengths, None if not seen."""
    kept = samples.get((policy, length_bucket(length)))
    return statistics.median(s.seconds / max(s.tokens, 1) for s in kept) if kept else None


def slowdown(found: Iterable[Sample], samples: Samples, policy: str) -> tuple[float, float] | None:
    """Returns the median seconds per token of samples, and a policy's at the same lengths.

    The first value is scaled to the lengths of the second: it is the baseline times the median of
    the ratios at each length. None if no length is common to both.
    """
    usual: dict[int, float] = {
        key[1]: statistics.median(s.seconds / max(s.tokens, 1) for s in kept)
        for key, kept in samples.items()
        if key[0] == policy
    }
    pairs = [
        (sample.seconds / max(sample.tokens, 1), usual[bucket])
        for sample in found
        if (bucket := length_bucket(sample.length)) in usual and usual[bucket] > 0
    ]
    if not pairs:
        return None
    baseline = statistics.median(known for _, known in pairs)
    return baseline * statistics.median(rate / known for rate, known in pairs), baseline


def slowdown_of_keep(found: Iterable[Sample]) -> tuple[float, float] | None:
    """Returns the median seconds per token of samples, and the planner's with everything kept.

    Both at the same lengths: the first value is the second times the median of the ratios. None if
    the planner knew none of the steps.
    """
    known = [(s, s.keep_seconds) for s in found if s.keep_seconds]
    if not known:
        return None
    baseline = statistics.median(seconds / max(s.tokens, 1) for s, seconds in known)
    return baseline * statistics.median(s.seconds / seconds for s, seconds in known), baseline


def relief(found: Iterable[Sample], samples: Samples, policy: str) -> tuple[float, float] | None:
    """Returns the median demand of samples and a policy's, in bytes, over batches equally long.

    None if no batch was as long under both.
    """
    pairs = []
    for sample in found:
        known = demand_at(samples, policy, sample.tokens)
        if known is not None and sample.demand_bytes is not None:
            pairs.append((sample.demand_bytes, known))
    if not pairs:
        return None
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def demand_at(samples: Samples, policy: str, tokens: int) -> int | None:
    """Returns the highest demand of a policy for a batch of so many tokens, None if not seen."""
    near = [
        sample.demand_bytes
        for sample in of_policy(samples, policy)
        if abs(sample.tokens - tokens) <= SAME_SHARE * tokens and sample.demand_bytes is not None
    ]
    return max(near, default=None)


def demand_up_to(samples: Samples, policy: str, tokens: int) -> int | None:
    """Returns an upper estimate of a policy's demand for a batch of so many tokens.

    Activations grow in proportion to the tokens or faster, so what the next longer batch held
    beside what was resident, scaled down to `tokens`, is enough. None if no batch was as long.
    """
    longer = [
        (sample.tokens, sample.demand_bytes, sample.resident_bytes)
        for sample in of_policy(samples, policy)
        if sample.tokens >= (1 - SAME_SHARE) * tokens and sample.demand_bytes is not None
    ]
    if not longer:
        return None
    found, demand, resident = min(longer, key=lambda s: (s[0], -s[1]))
    if found <= tokens or demand <= resident:
        return demand
    return resident + -(-(demand - resident) * tokens // found)

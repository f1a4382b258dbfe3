"""One finished micro-batch as risk, gates and audits see it: read from its event in the journal.

Live decisions and their audit read the same event, so both see the same numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

ComparisonOutcome = Literal["compared", "first run stands", "not compared"]
"""Of a batch that was to be run under two policies. Both runs were compared; memory ran out in the
first one, or it could not be taken back, so that it is the step; or memory ran out in the second
one, or the policy before is there no more, and the step is one of the policy in force."""

EXACT_SOURCE = "op ends"
"""The `peak_source` of peaks that are exact; others were read now and then."""


class Observation(NamedTuple):
    """One finished micro-batch; None in a field means that it is not known.

    A named tuple, which is made three times as fast as a frozen dataclass: one is made every step.
    """

    step: int
    """Number of the micro-batch, from 0."""

    tokens: int
    """Batch size x length."""

    length: int
    """Tokens of each sequence."""

    seconds: float
    """Wall time of forward and backward."""

    policy: str
    """Name of the policy that was in force."""

    pinned: bool = False
    """Whether only a person may change it."""

    depth: int = 0
    """Policies that can be gone back to, so that a rollback is told from a switch."""

    limit_bytes: int | None = None
    """The most that may be in use: the budget, or the capacity where that is less."""

    peak_bytes: int | None = None
    """Highest bytes in use of the step."""

    evicted_bytes: int = 0
    """Bytes that had to be let go of during the step."""

    num_failures: int = 0
    """Allocations that failed and were answered by running an op, a unit or the step again."""

    num_step_retries: int = 0
    """Those among them that the step as a whole had to answer."""

    in_use_bytes: int | None = None
    """Current after the step: bytes in use."""

    reserved_bytes: int | None = None
    """Current after the step: bytes that the allocator holds."""

    hole_bytes: int | None = None
    """Current after the step: free bytes between blocks in use."""

    capacity_bytes: int | None = None
    """Current after the step: what the memory has, less what others hold."""

    num_alloc_retries: int | None = None
    """Since start: allocations that succeeded only after cached blocks had been released."""

    num_ooms: int | None = None
    """Since start: out-of-memory errors of the allocator."""

    loss_difference: float | None = None
    """Relative difference of this batch's losses under the previous policy and this one."""

    gradient_difference: float | None = None
    """The same of its gradients."""

    comparison: ComparisonOutcome | None = None
    """What came of running the batch under both; None if it was run under one."""

    predicted_peak_bytes: int | None = None
    """Highest bytes in use that were expected of the step."""

    peak_is_sampled: bool = False
    """Whether memory was read now and then only, so that the peak may have been higher."""

    keep_seconds: float | None = None
    """What the planner expects forward and backward to take with everything kept."""

    is_previous: bool = False
    """Whether only its run under the previous policy counts: what it took says nothing of this one,
    and is left out."""

    @property
    def demand_bytes(self) -> int | None:
        """What the step would have held at once, had nothing been evicted (at most)."""
        return None if self.peak_bytes is None else self.peak_bytes + self.evicted_bytes

    @property
    def prediction_error(self) -> float | None:
        """|peak / predicted peak - 1|; None where nothing tells: a sampled peak below it."""
        if not self.predicted_peak_bytes or self.peak_bytes is None:
            return None
        if self.peak_is_sampled and self.peak_bytes <= self.predicted_peak_bytes:
            return None
        return abs(self.peak_bytes / self.predicted_peak_bytes - 1)


def observe(event: Mapping[str, Any]) -> Observation:
    """Returns what a `step` event of the journal says.

    Args:
        event: The event; fields that are missing count as unknown.
    """
    after: Mapping[str, Any] = event.get("after") or {}
    capacity = after.get("capacity_bytes") or None
    budget = event.get("budget_bytes")
    limit = budget if capacity is None or (budget is not None and budget <= capacity) else capacity
    step_retries = event.get("step_retries", 0)
    said = event.get("comparison")
    comparison = None if said is None else said["outcome"]
    is_previous = comparison == "first run stands"
    return Observation(
        step=event["step"],
        tokens=event["tokens"],
        length=event["length"],
        seconds=event["seconds"],
        policy=event["policy"],
        pinned=event.get("pinned", False),
        depth=event.get("depth", 0),
        limit_bytes=limit,
        peak_bytes=None if is_previous else event.get("peak_bytes"),
        evicted_bytes=0 if is_previous else event.get("evicted_bytes", 0),
        num_failures=0
        if is_previous
        else event.get("op_retries", 0) + event.get("unit_retries", 0) + step_retries,
        num_step_retries=0 if is_previous else step_retries,
        in_use_bytes=after.get("allocated_bytes"),
        reserved_bytes=after.get("reserved_bytes"),
        hole_bytes=after.get("inactive_split_bytes"),
        capacity_bytes=capacity,
        num_alloc_retries=after.get("num_alloc_retries"),
        num_ooms=after.get("num_ooms"),
        loss_difference=event.get("loss_difference"),
        gradient_difference=event.get("gradient_difference"),
        predicted_peak_bytes=event.get("predicted_peak_bytes"),
        peak_is_sampled=event.get("peak_source", EXACT_SOURCE) != EXACT_SOURCE,
        keep_seconds=event.get("keep_seconds"),
        comparison=comparison,
        is_previous=is_previous,
    )

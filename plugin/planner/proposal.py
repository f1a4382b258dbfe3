"""What the planner proposes for a step that is about to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematic.planner.forecast import kept_seconds
from rematic.planner.frontier import Pace
from rematic.planner.problem import Peak, Problem, intervals_of
from rematic.planner.solve import solve
from rematic.planner.unit_costs import StepCosts
from rematic.policy import OP_GROUPS, Action, Plan, Selective

BUCKETS_PER_FOLD = 64
"""Lengths share a plan if they lie within one such part of a factor e: 1.6 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A plan for one shape of batches; bytes are counted from what is in use when it starts."""

    plan: Plan
    """Action of each unit."""

    peak_bytes: int
    """How far the step rises."""

    rise_after_bytes: tuple[int, ...]
    """For each unit, how far the rest of the step rises above what is in use when its forward has
    ended; 0 where it only falls."""

    seconds: float
    """Time of forward and backward."""

    extra_seconds: float
    """What of that the plan takes beyond one that keeps everything."""

    fits: bool
    """Whether it rises no further than there is room."""


def length_of_bucket(length: int) -> int:
    """Returns the longest length that shares a plan with this one.

    Args:
        length: Tokens of a sequence, at least 1.
    """
    bucket = math.ceil(BUCKETS_PER_FOLD * math.log(length) - 1e-9)
    return max(length, math.floor(math.exp(bucket / BUCKETS_PER_FOLD)))


def propose(costs: StepCosts, problem: Problem, pace: Pace, *, room_bytes: int) -> Proposal:
    """Returns the fastest plan that rises no further than there is room, or the lightest one.

    Args:
        costs: What was measured of steps of the shape.
        problem: The problem made from them.
        pace: How fast the device is.
        room_bytes: Bytes by which the step may rise above what is in use when it starts.
    """
    solution = solve(problem, budget_bytes=problem.fixed.total + max(0, room_bytes))
    intervals = tuple(intervals_of(problem, solution.assignment))
    return Proposal(
        plan=Plan(actions=tuple(_by_group(action) for action in solution.plan.actions)),
        peak_bytes=solution.peak.total - problem.fixed.total,
        rise_after_bytes=_rises(intervals),
        seconds=kept_seconds(costs, pace) + solution.seconds,
        extra_seconds=solution.seconds,
        fits=solution.fits and room_bytes >= 0,
    )


def rise_of(problem: Problem) -> int:
    """Returns how far a step rises if every unit has the first of its options."""
    only = (0,) * len(problem.units)
    return max(peak.total for peak in intervals_of(problem, only)) - problem.fixed.total


def _rises(intervals: Sequence[Peak]) -> tuple[int, ...]:
    """Returns for each unit how high the step comes after its forward, beyond what is live then."""
    rises, highest = [], 0
    for place, after in zip(reversed(intervals[:-1]), reversed(intervals[1:]), strict=True):
        highest = max(highest, after.total)
        if place.place == "unit forward":
            live = after.fixed + after.kept + after.gradients
            rises.append(max(0, highest - live))
    return tuple(reversed(rises))


def _by_group(action: Action) -> Action:
    """Names attention by its group: the kernel of the device is another than that of the trace."""
    if not isinstance(action, Selective):
        return action
    kernels = OP_GROUPS["attention"]
    names = []
    for written in action.save:
        name, bracket, occurrence = written.partition("[")
        names.append(f"attention{bracket}{occurrence}" if name in kernels else written)
    return replace(action, save=tuple(names))

"""The one question to the planner: which plan is fastest within a budget?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematic.planner.casts import countings_of
from rematic.planner.prefix_program import fastest_assignment
from rematic.planner.problem import Option, Peak, Problem, peak_of, seconds_of
from rematic.planner.smallest import smallest_assignment, unhindered_assignment
from rematic.policy import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A plan for one problem and budget, and what it is expected to cost."""

    assignment: tuple[int, ...]
    """Position of each unit's option in the problem."""

    plan: Plan
    """The actions of those options."""

    peak: Peak
    """Where the step is highest under it."""

    seconds: float
    """Time of the step beyond that with everything kept."""

    fits: bool
    """Whether the peak is within the budget. If not, no plan is: this is the one with the lowest
    peak, and `peak.total` the smallest budget that is enough. (Where options of a unit leave other
    gradients, or callers or autocast hold other bytes, the lowest that was found.)"""


def solve(
    problem: Problem, *, budget_bytes: int, moved_budget_bytes: int | None = None
) -> Solution:
    """Returns the fastest plan within a budget, or the lightest one if none fits.

    The same problem and budget always give the same plan, and more budget never a slower one.

    Args:
        problem: The problem.
        budget_bytes: Bytes that the peak may reach.
        moved_budget_bytes: Bytes that may be away in host memory or on disk; None: no limit. The
            room goes to the units that run first, whose tensors are away longest.

    Raises:
        ValueError: If some unit has no option that stays on the device, and there is no room
            elsewhere.
    """
    if moved_budget_bytes is not None:
        problem, positions = _without_far_moves(problem, moved_budget_bytes)
    else:
        positions = None
    assignment, fits = _best(problem, budget_bytes)
    solution = _solution(problem, assignment, fits=fits)
    if positions is None:
        return solution
    original = tuple(positions[i][choice] for i, choice in enumerate(assignment))
    return replace(solution, assignment=original)


def _best(problem: Problem, budget_bytes: int) -> tuple[tuple[int, ...], bool]:
    """Returns the assignment and whether it fits.

    The program's answer is set against two fixed plans, because rounding may hide them.
    """
    unhindered = unhindered_assignment(problem)
    if peak_of(problem, unhindered).total <= budget_bytes:
        return unhindered, True
    smallest = smallest_assignment(problem)
    if peak_of(problem, smallest).total > budget_bytes:
        return smallest, False
    fastest = _fastest(problem, budget_bytes, below=seconds_of(problem, smallest))
    return (smallest if fastest is None else fastest), True


def _fastest(problem: Problem, budget_bytes: int, *, below: float) -> tuple[int, ...] | None:
    """Returns the fastest assignment of all ways to count; None if none takes `below` or less."""
    best, seconds = None, below
    for counting in countings_of(problem):
        least = seconds_of(counting.problem, unhindered_assignment(counting.problem))
        if least > seconds or (least == seconds and best is not None):
            continue
        found = fastest_assignment(
            counting.problem, limits=counting.limits, budget_bytes=budget_bytes
        )
        if found is None:
            continue
        taken = seconds_of(counting.problem, found)
        if taken < seconds or (taken == seconds and best is None):
            best, seconds = counting.original(found), taken
    return best


def _solution(problem: Problem, assignment: tuple[int, ...], *, fits: bool) -> Solution:
    pairs = zip(problem.units, assignment, strict=True)
    return Solution(
        assignment=assignment,
        plan=Plan(actions=tuple(options[choice].action for options, choice in pairs)),
        peak=peak_of(problem, assignment),
        seconds=seconds_of(problem, assignment),
        fits=fits,
    )


def _without_far_moves(
    problem: Problem, moved_budget_bytes: int
) -> tuple[Problem, list[tuple[int, ...]]]:
    """Takes moving options away from the units for which there is no room.

    Returns the problem and, for each unit, the positions that its options had before.
    """
    left = moved_budget_bytes
    units: list[tuple[Option, ...]] = []
    positions: list[tuple[int, ...]] = []
    for i, options in enumerate(problem.units):
        allowed = tuple(a for a, option in enumerate(options) if option.moved_bytes <= left)
        if not allowed:
            raise ValueError(
                f"unit {i} has only options that move bytes away, and {left} of the "
                f"{moved_budget_bytes} bytes of moved_budget_bytes are left for it: expected room "
                "for the smallest. Raise it, or let the unit be recomputed."
            )
        left -= max(options[a].moved_bytes for a in allowed)
        units.append(
            options if len(allowed) == len(options) else tuple(options[a] for a in allowed)
        )
        positions.append(allowed)
    return replace(problem, units=tuple(units)), positions

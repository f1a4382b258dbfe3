"""The one question to the planner: which plan is fastest within a budget?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematic.planner.limits import limits_of
from rematic.planner.prefix_program import fastest_assignment
from rematic.planner.problem import Option, Peak, Problem, peak_of, seconds_of
from rematic.planner.smallest import smallest_assignment
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
    peak, and `peak.total` the smallest budget that is enough."""


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
    unhindered = tuple(
        min(range(len(options)), key=lambda a: (options[a].seconds, options[a].kept_bytes))
        for options in problem.units
    )
    if peak_of(problem, unhindered).total <= budget_bytes:
        return unhindered, True
    limits = limits_of(problem)
    smallest = smallest_assignment(problem, limits=limits)
    if peak_of(problem, smallest).total > budget_bytes:
        return smallest, False
    fastest = fastest_assignment(problem, limits=limits, budget_bytes=budget_bytes)
    if fastest is None or seconds_of(problem, smallest) < seconds_of(problem, fastest):
        return smallest, True
    return fastest, True


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

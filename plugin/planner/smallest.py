"""The smallest budget that any plan fits into, exactly."""

from __future__ import annotations

from collections.abc import Sequence

from rematic.planner.casts import countings_of
from rematic.planner.limits import Limits
from rematic.planner.problem import Problem, peak_of

_Candidate = tuple[int, int, int]
"""Kept bytes, need, and position of an option."""


def unhindered_assignment(problem: Problem) -> tuple[int, ...]:
    """Returns the fastest assignment, whatever it keeps; of equals one that keeps least.

    Args:
        problem: The problem.
    """
    best = {
        options: min(range(len(options)), key=lambda a: (options[a].seconds, options[a].kept_bytes))
        for options in dict.fromkeys(problem.units)
    }
    return tuple(best[options] for options in problem.units)


def smallest_assignment(problem: Problem) -> tuple[int, ...]:
    """Returns the assignment with the lowest peak; of equals one that keeps least.

    Where the options of a unit differ in what limits count from above, it is the lowest of those
    that this finds.

    Args:
        problem: The problem.
    """
    found = [one.original(_by_limits(one.problem, one.limits)) for one in countings_of(problem)]
    found.append(unhindered_assignment(problem))
    return min(found, key=lambda assignment: peak_of(problem, assignment).total)


def _by_limits(problem: Problem, limits: Limits) -> tuple[int, ...]:
    """Returns the assignment with the lowest peak by limits.

    A prefix can never be too small, so under a given budget it is right to take, unit by unit, the
    option that keeps least of those whose limit allows the prefix. The smallest budget for which
    that goes through is found by bisection over bytes.
    """
    units = _candidates(problem, limits)
    low = max(limits.around, limits.base)  # below that nothing fits
    high = low
    while _lightest(units, limits, budget_bytes=high) is None:
        high = 2 * high + 1
    while low < high:
        middle = (low + high) // 2
        if _lightest(units, limits, budget_bytes=middle) is None:
            low = middle + 1
        else:
            high = middle
    assignment = _lightest(units, limits, budget_bytes=high)
    assert assignment is not None
    return assignment


def _candidates(problem: Problem, limits: Limits) -> list[list[_Candidate]]:
    """Of each unit the options worth a look: less is kept only where more is needed."""
    known: dict[tuple[int, tuple[int, ...]], list[_Candidate]] = {}
    units = []
    for options, needs in zip(problem.units, limits.needs, strict=True):
        key = (id(options), needs)
        if key not in known:
            by_kept = sorted((o.kept_bytes, needs[a], a) for a, o in enumerate(options))
            known[key] = _undominated(by_kept)
        units.append(known[key])
    return units


def _undominated(by_kept: Sequence[_Candidate]) -> list[_Candidate]:
    chosen: list[_Candidate] = []
    for candidate in by_kept:
        if not chosen or candidate[1] < chosen[-1][1]:
            chosen.append(candidate)
    return chosen


def _lightest(
    units: Sequence[Sequence[_Candidate]], limits: Limits, *, budget_bytes: int
) -> tuple[int, ...] | None:
    """Returns the assignment that keeps least within the budget; None if there is none."""
    room = budget_bytes - limits.base
    prefix, assignment = 0, []
    for candidates in units:
        for kept, need, position in candidates:
            if prefix + need <= room:
                prefix += kept
                assignment.append(position)
                break
        else:
            return None
    return tuple(assignment) if prefix + limits.head <= room else None

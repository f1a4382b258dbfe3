"""Every assignment, one after the other: the truth for a handful of units."""

from __future__ import annotations

import itertools

from rematic.planner.problem import Problem, peak_of, seconds_of

MAX_ASSIGNMENTS = 10_000_000
"""More than this are refused."""


def best_of_all(problem: Problem, *, budget_bytes: int) -> tuple[int, ...] | None:
    """Returns the fastest assignment within the budget, the first of equals; None if none fits.

    Args:
        problem: The problem.
        budget_bytes: Bytes that the peak may reach.

    Raises:
        ValueError: If there are too many assignments to try.
    """
    total = 1
    for options in problem.units:
        total *= len(options)
    if total > MAX_ASSIGNMENTS:
        raise ValueError(
            f"there are {total} assignments: expected at most {MAX_ASSIGNMENTS}; take fewer units."
        )
    best: tuple[int, ...] | None = None
    best_seconds = float("inf")
    for assignment in itertools.product(*(range(len(options)) for options in problem.units)):
        seconds = seconds_of(problem, assignment)
        if seconds < best_seconds and peak_of(problem, assignment).total <= budget_bytes:
            best, best_seconds = assignment, seconds
    return best

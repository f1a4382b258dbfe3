"""The exact answer by integer programming: what the fast planner is measured against.

Needs scipy (the extra `planner-oracle`). Tenths of a second to minutes, so nothing at run time uses
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rematic.planner.problem import Problem

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

_BYTES_SCALE = 2.0**20
"""The solver's tolerances are absolute: it is given MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MilpAnswer:
    """What the solver found in its time."""

    assignment: tuple[int, ...] | None
    """Best assignment found; None if none was."""

    bound_seconds: float
    """No assignment within the budget is faster than that; infinite if none fits."""

    is_proved: bool
    """Whether the assignment is known to be the fastest, or none to fit."""


def solve_exactly(
    problem: Problem, *, budget_bytes: int, time_limit_seconds: float = 60.0
) -> MilpAnswer:
    """Returns the fastest assignment within a budget, by `scipy.optimize.milp`.

    One binary variable for each option of each unit; one row for each interval of the step, which
    says that its live bytes stay within the budget.

    Args:
        problem: The problem.
        budget_bytes: Bytes that the peak may reach.
        time_limit_seconds: Time after which the solver stops with what it has.

    Raises:
        ModuleNotFoundError: scipy is not installed.
    """
    relaxed = _run(problem, budget_bytes, time_limit_seconds, integral=False)
    result = _run(problem, budget_bytes, time_limit_seconds, integral=True)
    infeasible = 2 in (relaxed.status, result.status)
    assignment = None if result.x is None else _assignment(problem, result.x)
    bounds = [0.0, *(_bound(one) for one in (relaxed, result))]
    return MilpAnswer(
        assignment=assignment,
        bound_seconds=float("inf") if infeasible else max(bounds) * _scale(problem),
        is_proved=infeasible or result.status == 0,
    )


def _run(
    problem: Problem, budget_bytes: int, time_limit_seconds: float, *, integral: bool
) -> OptimizeResult:
    """Solves the program; without integrality it is quick and gives a bound in any case."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    seconds = np.array([option.seconds for options in problem.units for option in options])
    if not len(seconds):
        raise ValueError("the problem has no units: expected at least one to choose for.")
    rows, limits = _intervals(problem, budget_bytes)
    return milp(
        seconds / _scale(problem),
        constraints=[
            LinearConstraint(_one_option_each(problem), 1, 1),
            LinearConstraint(rows / _BYTES_SCALE, -np.inf, limits / _BYTES_SCALE),
        ],
        integrality=np.full(len(seconds), int(integral)),
        bounds=Bounds(0, 1),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )


def _scale(problem: Problem) -> float:
    return max(1e-12, *(option.seconds for options in problem.units for option in options))


def _bound(result: OptimizeResult) -> float:
    """Returns what no solution is below, in scaled seconds."""
    bound = result.get("mip_dual_bound")
    if bound is None and result.status == 0:
        bound = result.fun
    return 0.0 if bound is None or not np.isfinite(bound) else float(bound)


def _offsets(problem: Problem) -> list[int]:
    offsets = [0]
    for options in problem.units:
        offsets.append(offsets[-1] + len(options))
    return offsets


def _one_option_each(problem: Problem) -> npt.NDArray[np.float64]:
    offsets = _offsets(problem)
    matrix = np.zeros((len(problem.units), offsets[-1]))
    for i in range(len(problem.units)):
        matrix[i, offsets[i] : offsets[i + 1]] = 1
    return matrix


def _intervals(
    problem: Problem, budget_bytes: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns a row of bytes by option for each interval, and what the row may sum up to."""
    around, offsets = problem.around, _offsets(problem)
    columns = [option for options in problem.units for option in options]
    kept = np.array([option.kept_bytes for option in columns], dtype=float)
    gradient = np.array([option.gradient_bytes for option in columns], dtype=float)
    forward = np.array([option.forward_bytes for option in columns], dtype=float)
    backward = np.array([option.backward_bytes for option in columns], dtype=float)
    cast = np.array([option.cast_bytes for option in columns], dtype=float)
    held = cast + np.array([option.late_bytes for option in columns], dtype=float)
    room = budget_bytes - problem.fixed.total
    inside = room - around.embedding_kept
    rows, limits = [kept + cast, kept], [inside - around.head + around.casts, inside]
    if around.head_uncast is not None:
        limits[1] -= around.head_uncast
    for i in range(len(problem.units)):
        start, stop = offsets[i], offsets[i + 1]
        own = np.zeros(len(columns))
        own[start:stop] = 1
        before, after = np.zeros(len(columns)), np.zeros(len(columns))
        before[:start], after[stop:] = 1, 1
        rows.append(before * (kept + held) + own * (forward + cast))
        limits.append(inside + around.casts)
        rows.append(before * kept + own * (kept + backward) + after * gradient)
        limits.append(inside - around.head_left)
    left = room - around.head_left
    rows += [gradient, gradient, np.zeros(len(columns))]
    limits += [
        left - around.embedding_kept - around.embedding_backward,
        left - around.embedding_gradient - around.optimizer,
        room - around.embedding_forward,
    ]
    return np.array(rows), np.array(limits, dtype=float)


def _assignment(problem: Problem, x: npt.NDArray[np.float64]) -> tuple[int, ...]:
    offsets = _offsets(problem)
    return tuple(int(np.argmax(x[offsets[i] : offsets[i + 1]])) for i in range(len(problem.units)))

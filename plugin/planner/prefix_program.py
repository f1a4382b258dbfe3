"""The prefix dynamic program: the fastest assignment within a budget.

State: the bytes that the units so far keep, in quanta, less what they keep at least. Value: the
least seconds. An option may only be entered from prefixes within its limit. Kept bytes are rounded
up to quanta and limits down, so a plan that is found fits exactly.

The size of a quantum follows from the problem and not from the budget. Hence a larger budget only
ever allows more, and its plan is never slower; quanta derived from the budget would break that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rematic.planner.dominance import undominated
from rematic.planner.limits import Limits
from rematic.planner.problem import Option, Problem
from rematic.planner.quanta import quantum_bytes


class _Entry(NamedTuple):
    """One option of one unit, in quanta."""

    position: int
    seconds: float
    weight: int
    """What it keeps beyond what the unit keeps at least."""
    cap: int
    """Largest state from which it may be entered."""


def fastest_assignment(
    problem: Problem, *, limits: Limits, budget_bytes: int
) -> tuple[int, ...] | None:
    """Returns the fastest assignment within the budget; None if the program finds none.

    Of equally fast ones it is the one that keeps least, then the one whose last units have the
    first options. Rounding may hide a plan that fits by less than a quantum per unit.

    Args:
        problem: The problem.
        limits: Its limits.
        budget_bytes: Bytes that the peak may reach.
    """
    if budget_bytes < limits.around:
        return None
    usable = {options: undominated(options) for options in dict.fromkeys(problem.units)}
    least = [min(option.kept_bytes for option in options) for options in problem.units]
    quantum = quantum_bytes(problem.units)
    weights = [
        _weights(options, low, quantum) for options, low in zip(problem.units, least, strict=True)
    ]
    room = budget_bytes - limits.base
    num_states = (room - limits.head - sum(least)) // quantum + 1
    num_states = min(num_states, sum(max(w) for w in weights) + 1)
    if num_states < 1:
        return None
    seconds = np.zeros(1)
    choices = []
    for i, options in enumerate(problem.units):
        entries = [
            _Entry(a, options[a].seconds, weights[i][a], (room - limits.needs[i][a]) // quantum)
            for a in usable[options]
        ]
        seconds, chosen = _advance(seconds, entries, num_states=num_states)
        room -= least[i]
        choices.append(chosen)
    return _walk_back(seconds, choices, weights)


def _weights(options: Sequence[Option], least: int, quantum: int) -> list[int]:
    return [-(-(option.kept_bytes - least) // quantum) for option in options]


def _advance(
    seconds: npt.NDArray[np.float64], entries: Sequence[_Entry], *, num_states: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """Returns the least seconds of each state after one more unit, and the option that gave it."""
    reached = min(len(seconds) + max(entry.weight for entry in entries), num_states)
    best = np.full(reached, np.inf)
    chosen = np.full(reached, -1, dtype=np.int16)
    for entry in entries:
        num_sources = min(entry.cap + 1, len(seconds), reached - entry.weight)
        if num_sources <= 0:
            continue
        states = slice(entry.weight, entry.weight + num_sources)
        candidate = seconds[:num_sources] + entry.seconds
        better = candidate < best[states]
        np.copyto(best[states], candidate, where=better)
        chosen[states][better] = entry.position
    return best, chosen


def _walk_back(
    seconds: npt.NDArray[np.float64],
    choices: Sequence[npt.NDArray[np.int16]],
    weights: Sequence[Sequence[int]],
) -> tuple[int, ...] | None:
    state = int(np.argmin(seconds))
    if not np.isfinite(seconds[state]):
        return None
    assignment = []
    for chosen, unit_weights in zip(reversed(choices), reversed(weights), strict=True):
        position = int(chosen[state])
        assignment.append(position)
        state -= unit_weights[position]
    return tuple(reversed(assignment))

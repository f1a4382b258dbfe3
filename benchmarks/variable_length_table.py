"""What actions cost at each length, and the best plans by exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rematic.cost.profile import StepProfile
from rematic.planner import OpCost, Option, Pace, StepCosts, problem_of
from rematic.policy import Action

MAX_ALL_ASSIGNMENTS = 3**9
"""Up to so many assignments are tried one by one; beyond, those that are sorted by bytes."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds that each action adds to one block, measured at some lengths."""

    lengths: tuple[int, ...]
    """Tokens, rising."""

    extra: dict[str, tuple[float, ...]]
    """For each action the seconds beyond `keep`, one block, at each length."""

    def seconds(self, action: str, length: int) -> float:
        """Returns the seconds at any length: in proportion below the first, else interpolated."""
        known = self.extra[action]
        if length <= self.lengths[0]:
            return known[0] * length / self.lengths[0]
        return float(np.interp(length, self.lengths, known))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The actions among which a mix is searched, with their costs."""

    names: tuple[str, ...]
    """Keys of the table."""

    actions: tuple[Action, ...]
    """The actions themselves."""


def best_mixes(
    choices: Choices,
    profile: StepProfile,
    *,
    length: int,
    room_bytes: int,
    seconds: Sequence[float],
) -> list[tuple[int, ...]]:
    """Returns the fastest assignments that rise no further than there is room, the best first.

    Every assignment is tried, or, where those are too many, every mix of the actions with the
    blocks in the orders of rising and of falling bytes.

    Args:
        choices: The actions.
        profile: What steps cost in bytes.
        length: Tokens of the step that must fit.
        room_bytes: How far it may rise.
        seconds: What each action adds to one block.
    """
    costs = profile.costs_at(batch=1, length=length)
    options = options_at(choices, costs)
    num_units = len(options)
    assignments = _assignments(options, len(choices.names), num_units)
    rises = rises_of(options, costs, assignments)
    total = np.asarray(seconds)[assignments].sum(axis=1)
    fitting = np.flatnonzero(rises <= room_bytes)
    kept = _kept(options)[assignments, np.arange(num_units)].sum(axis=1)
    order = fitting[np.lexsort((kept[fitting], total[fitting]))]
    return [tuple(int(a) for a in assignments[i]) for i in order[:50]]


def options_at(choices: Choices, costs: StepCosts) -> list[list[Option]]:
    """Returns for each unit the bytes of each action."""
    still = Pace(
        op_seconds=_no_time, replay_seconds=0, selective_seconds=0, moved_bytes_per_second=1
    )
    by_action = [
        problem_of(costs, still, given=[action] * len(costs.unit_classes)).units
        for action in choices.actions
    ]
    return [[units[i][0] for units in by_action] for i in range(len(costs.unit_classes))]


def _no_time(op: OpCost) -> float:
    return 0.0


def _assignments(
    options: Sequence[Sequence[Option]], num_actions: int, num_units: int
) -> npt.NDArray[np.intp]:
    if num_actions**num_units <= MAX_ALL_ASSIGNMENTS:
        return np.array(list(itertools.product(range(num_actions), repeat=num_units)), np.intp)
    middle = options[num_units // 2]
    rising = sorted(range(num_actions), key=lambda a: middle[a].kept_bytes)
    mixes = np.array(
        list(itertools.combinations_with_replacement(rising, num_units)), dtype=np.intp
    )
    return np.concatenate([mixes, mixes[:, ::-1]])


def _kept(options: Sequence[Sequence[Option]]) -> npt.NDArray[np.int64]:
    """Returns kept bytes by action and unit."""
    return np.array([[o.kept_bytes for o in unit] for unit in options], np.int64).T


def rises_of(
    options: Sequence[Sequence[Option]], costs: StepCosts, assignments: npt.NDArray[np.intp]
) -> npt.NDArray[np.int64]:
    """Returns how far a step rises above its start under each assignment.

    Args:
        options: Bytes of each action of each unit.
        costs: The step.
        assignments: `(plans, units)`, positions of actions.
    """

    def column(read: Callable[[Option], int], i: int) -> npt.NDArray[np.int64]:
        return np.array([read(option) for option in options[i]], np.int64)[assignments[:, i]]

    around, num_units = costs.around, len(options)
    live = np.full(len(assignments), around.embedding_kept, np.int64)
    peak = np.maximum(live, around.embedding_forward)
    for i in range(num_units):
        peak = np.maximum(peak, live + column(lambda o: o.forward_bytes, i))
        live = live + column(lambda o: o.kept_bytes, i)
    peak = np.maximum(peak, live + around.head)
    live = live + around.head_left
    for i in reversed(range(num_units)):
        peak = np.maximum(peak, live + column(lambda o: o.backward_bytes, i))
        live = live - column(lambda o: o.kept_bytes, i) + column(lambda o: o.gradient_bytes, i)
    peak = np.maximum(peak, live + around.embedding_backward)
    return np.maximum(peak, around.optimizer)


def table_of(rows: Sequence[dict[str, Any]], *, num_units: int) -> Table:
    """Returns the table from steps in which every block had the same action.

    Each step is compared with the one that kept everything in the same round; the median counts.

    Args:
        rows: Figures with `length`, `round`, `action`, `baseline` (the name of its `keep`), `cpu`.
        num_units: Blocks.
    """
    kept = {(r["baseline"], r["length"], r["round"]): r["cpu"] for r in rows if r["is_keep"]}
    lengths = tuple(sorted({row["length"] for row in rows}))
    names = dict.fromkeys(row["action"] for row in rows)
    extra: dict[str, tuple[float, ...]] = {}
    for name in names:
        found = []
        for length in lengths:
            shares = [
                row["cpu"] - kept[row["baseline"], length, row["round"]]
                for row in rows
                if row["action"] == name and row["length"] == length
            ]
            found.append(max(0.0, float(np.median(shares))) / num_units)
        extra[name] = tuple(found)
    return Table(lengths=lengths, extra=extra)

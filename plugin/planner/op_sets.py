"""Which results of a unit's ops are worth keeping: an additive knapsack.

A selective replay runs every op before its stop whose result was not kept, whatever depends on it.
So keeping a result saves the time of that op and costs its bytes, whatever else is kept: seconds
and bytes add up, and the best sets are the undominated sums of items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rematic.planner.unit_costs import OpCost
from rematic.policy import parse_op_name

MAX_SETS = 512
"""Most sets that are carried along; more are thinned out evenly by bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSet:
    """Ops whose results are kept."""

    ops: tuple[int, ...]
    """Their positions in the unit's forward, in order."""

    kept_bytes: int
    """Bytes that keeping them costs."""

    saved_seconds: float
    """Time that a replay saves by them."""


def keepable_ops(ops: Sequence[OpCost]) -> tuple[int, ...]:
    """Returns the positions of the ops whose results a selective replay may keep.

    Not views, which follow their storage; not random ops, behind which the generator would not
    advance; not results that a later op changes in place, nor what is behind the replay's stop.

    Args:
        ops: The ops of a unit's forward.
    """
    changed = {op.storage_of for op in ops if op.is_in_place}
    return tuple(
        i
        for i, op in enumerate(ops)
        if op.storage_of is None
        and not (op.is_in_place or op.is_random)
        and op.is_replayed
        and op.result_bytes > 0
        and i not in changed
    )


def kept_bytes_of(op: OpCost) -> int:
    """Returns what keeping an op's result costs: nothing if it lives on anyway, as the output."""
    return 0 if op.freed_after is None else op.result_bytes


def best_op_sets(
    ops: Sequence[OpCost], op_seconds: Sequence[float], *, below_bytes: int | None = None
) -> tuple[OpSet, ...]:
    """Returns the undominated op sets by falling bytes; the last one is empty or costs nothing.

    Of sets with equal bytes and seconds the one that names earlier ops remains.

    Args:
        ops: The ops of a unit's forward.
        op_seconds: Time of each.
        below_bytes: Sets that cost so much or more are of no interest; None: all are.
    """
    free = [i for i in keepable_ops(ops) if kept_bytes_of(ops[i]) == 0 and op_seconds[i] > 0]
    items = [i for i in keepable_ops(ops) if kept_bytes_of(ops[i]) > 0 and op_seconds[i] > 0]
    start = sum(op_seconds[i] for i in free)
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, start, tuple(free))]
    for i in items:
        with_item = [
            (kept + kept_bytes_of(ops[i]), seconds + op_seconds[i], (*chosen, i))
            for kept, seconds, chosen in front
            if below_bytes is None or kept + kept_bytes_of(ops[i]) < below_bytes
        ]
        front = _thin(_undominated([*front, *with_item]))
    return tuple(
        OpSet(ops=tuple(sorted(chosen)), kept_bytes=kept, saved_seconds=seconds)
        for kept, seconds, chosen in reversed(front)
    )


def named_op_set(ops: Sequence[OpCost], op_seconds: Sequence[float], names: Sequence[str]) -> OpSet:
    """Returns the set that `selective` with these names keeps.

    Args:
        ops: The ops of a unit's forward.
        op_seconds: Time of each.
        names: As a user writes them: `matmul`, `aten::mm[3]`.
    """
    keepable = set(keepable_ops(ops))
    wanted = [parse_op_name(name) for name in names]
    before: Counter[str] = Counter()
    chosen = []
    for i, op in enumerate(ops):
        for one in wanted:
            counted = sum(before[name] for name in one.ops)
            if op.name in one.ops and one.occurrence in (None, counted) and i in keepable:
                chosen.append(i)
                break
        before[op.name] += 1
    return OpSet(
        ops=tuple(chosen),
        kept_bytes=sum(kept_bytes_of(ops[i]) for i in chosen),
        saved_seconds=sum(op_seconds[i] for i in chosen),
    )


def corner_sets(
    ops: Sequence[OpCost], op_seconds: Sequence[float], *, below_bytes: int | None = None
) -> tuple[OpSet, ...]:
    """Returns the sets on the convex hull of bytes and seconds, by falling bytes.

    They are those that take ops in the order of seconds saved per byte (Dantzig 1957, "Discrete-
    variable extremum problems"). Of many equal units only these are mixed: any other set is beaten
    by a mix of two of them.

    Args:
        ops: The ops of a unit's forward.
        op_seconds: Time of each.
        below_bytes: Sets that cost so much or more are of no interest; None: all are.
    """
    items = [i for i in keepable_ops(ops) if op_seconds[i] > 0]
    free = [i for i in items if kept_bytes_of(ops[i]) == 0]
    paid = [i for i in items if kept_bytes_of(ops[i]) > 0]
    paid.sort(key=lambda i: (-op_seconds[i] / kept_bytes_of(ops[i]), i))
    chosen, kept, saved = list(free), 0, sum(op_seconds[i] for i in free)
    sets = [OpSet(ops=tuple(sorted(chosen)), kept_bytes=kept, saved_seconds=saved)]
    for i in paid:
        chosen.append(i)
        kept += kept_bytes_of(ops[i])
        saved += op_seconds[i]
        if below_bytes is not None and kept >= below_bytes:
            break
        sets.append(OpSet(ops=tuple(sorted(chosen)), kept_bytes=kept, saved_seconds=saved))
    return tuple(reversed(sets))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSet:
    """An op set with what it costs a step."""

    op_set: OpSet
    """The ops."""

    seconds: float
    """Time of the step beyond that with `keep`: the replay, and the host."""


def choose_sets(
    candidates: Sequence[TimedSet], *, ends: Sequence[tuple[int, float]], limit: int
) -> tuple[OpSet, ...]:
    """Returns at most `limit` sets by falling bytes: those that mixes of many units need.

    Again and again the one whose seconds lie lowest under the line between its neighbours, so that
    little is lost by leaving the others out. If none lies under it any more and there is room, some
    that lie evenly over the bytes: a few units cannot be mixed as finely.

    Args:
        candidates: Sets to choose from.
        ends: Bytes and seconds of what there is anyway: `keep`, and `recompute` with 0 bytes.
        limit: Most sets to return.
    """
    left = _fastest_by_bytes(candidates)
    line = sorted(ends)
    chosen: list[OpSet] = []
    while left and len(chosen) < limit:
        gap, position = max((_gap(line, one), -i) for i, one in enumerate(left))
        if gap <= 0:
            break
        one = left.pop(-position)
        chosen.append(one.op_set)
        line = sorted([*line, (one.op_set.kept_bytes, one.seconds)])
    room = min(limit - len(chosen), len(left))
    chosen += [left[(2 * k + 1) * len(left) // (2 * room)].op_set for k in range(room)]
    return tuple(sorted(chosen, key=lambda one: (-one.kept_bytes, one.ops)))


def _fastest_by_bytes(candidates: Sequence[TimedSet]) -> list[TimedSet]:
    """Returns, by rising bytes, the sets that are faster than every one that keeps less."""
    fastest: list[TimedSet] = []
    order = sorted(candidates, key=lambda one: (one.op_set.kept_bytes, one.seconds, one.op_set.ops))
    for one in order:
        if not fastest or one.seconds < fastest[-1].seconds:
            fastest.append(one)
    return fastest


def _gap(line: Sequence[tuple[int, float]], one: TimedSet) -> float:
    """Returns how far a set lies under the line through points of rising bytes; 0 beyond it."""
    kept = one.op_set.kept_bytes
    for (left_bytes, left_seconds), (right_bytes, right_seconds) in pairwise(line):
        if left_bytes <= kept <= right_bytes and left_bytes < right_bytes:
            share = (kept - left_bytes) / (right_bytes - left_bytes)
            return left_seconds + share * (right_seconds - left_seconds) - one.seconds
    return 0.0


def _undominated(
    sets: Sequence[tuple[int, float, tuple[int, ...]]],
) -> list[tuple[int, float, tuple[int, ...]]]:
    """Keeps, by rising bytes, the sets that save more time than every smaller one."""
    chosen: list[tuple[int, float, tuple[int, ...]]] = []
    for one in sorted(sets, key=lambda one: (one[0], -one[1], one[2])):
        if not chosen or one[1] > chosen[-1][1]:
            chosen.append(one)
    return chosen


def _thin(
    sets: list[tuple[int, float, tuple[int, ...]]],
) -> list[tuple[int, float, tuple[int, ...]]]:
    if len(sets) <= MAX_SETS:
        return sets
    last = len(sets) - 1
    return [sets[i * last // (MAX_SETS - 1)] for i in range(MAX_SETS)]

"""Which results of a unit's ops are worth keeping: an additive knapsack.

A selective replay runs every op before its stop whose result was not kept, whatever depends on it.
So keeping a result saves the time of that op and costs its bytes, whatever else is kept: seconds
and bytes add up, and the best sets are the undominated sums of items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


def choose_sets(
    corners: Sequence[OpSet], others: Sequence[OpSet], *, limit: int
) -> tuple[OpSet, ...]:
    """Returns at most `limit` sets by falling bytes: corners first, then others.

    Of the corners the two ends, then again and again the one that saves most time over the line
    between its neighbours; of the others, if there is room, some that lie evenly over the bytes.

    Args:
        corners: Sets on the convex hull, by falling bytes.
        others: Further undominated sets, by falling bytes.
        limit: Most sets to return, at least 2.
    """
    chosen = sorted({0, len(corners) - 1})
    while len(chosen) < min(limit, len(corners)):
        left = [i for i in range(len(corners)) if i not in chosen]
        gaps = [(_gap(corners, chosen, i), -i) for i in left]
        chosen = sorted([*chosen, -max(gaps)[1]])
    sets = {corners[i].ops: corners[i] for i in chosen}
    rest = [op_set for op_set in others if op_set.ops not in sets]
    room = min(limit - len(sets), len(rest))
    for k in range(room):
        op_set = rest[(2 * k + 1) * len(rest) // (2 * room)]
        sets[op_set.ops] = op_set
    return tuple(sorted(sets.values(), key=lambda one: (-one.kept_bytes, one.ops)))


def _gap(corners: Sequence[OpSet], chosen: Sequence[int], i: int) -> float:
    """Returns how much more time a corner saves than a mix of the chosen ones beside it."""
    above = corners[max(j for j in chosen if j < i)]
    below = corners[min(j for j in chosen if j > i)]
    corner = corners[i]
    share = (corner.kept_bytes - below.kept_bytes) / (above.kept_bytes - below.kept_bytes)
    mixed = below.saved_seconds + share * (above.saved_seconds - below.saved_seconds)
    return corner.saved_seconds - mixed


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

"""From what was measured of a step to the problem: the options of each class of units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rematic.planner.op_sets import (
    OpSet,
    TimedSet,
    best_op_sets,
    choose_sets,
    corner_sets,
    named_op_set,
)
from rematic.planner.problem import Option, Problem
from rematic.planner.unit_costs import ActionBytes, OpCost, StepCosts, UnitCosts
from rematic.policy import (
    DEFAULT_SAVED,
    Action,
    Compress,
    Keep,
    Offload,
    Recompute,
    RecomputeOffload,
    Selective,
)

LOSSLESS = ("keep", "selective", "recompute", "recompute+offload", "offload")
"""Actions among which a plan is chosen unless the user names others."""

MAX_OP_SETS = 10
"""Most op sets of one class that become options."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast the device is, as far as a plan asks."""

    op_seconds: Callable[[OpCost], float]
    """Time of one op."""

    replay_seconds: float
    """Time of the host for one replay, beside its ops."""

    selective_seconds: float
    """Time of the host for one selective forward and replay, beside its ops."""

    moved_bytes_per_second: float
    """Speed at which tensors move away, and come back."""

    overlaps_host: bool = False
    """Whether ops run while the host prepares the next: then the slower of the two counts."""

    def with_host(self, device_seconds: float, host_seconds: float) -> float:
        """Returns the time of ops and of the host together."""
        if self.overlaps_host:
            return max(device_seconds, host_seconds)
        return device_seconds + host_seconds


def problem_of(
    costs: StepCosts,
    pace: Pace,
    *,
    allowed: Collection[str] = LOSSLESS,
    given: Sequence[Action | None] | None = None,
) -> Problem:
    """Returns the problem of a step: every unit with the options of its class.

    Args:
        costs: What was measured.
        pace: How fast the device is.
        allowed: Names of the actions that a plan may use.
        given: For each unit the action that it has in any case, or None; None: no unit has one.

    Raises:
        ValueError: If a class of units is left without an option, or a given action was not
            measured.
    """
    options = [options_of(unit, pace, allowed=allowed) for unit in costs.classes]
    units = [options[i] for i in costs.unit_classes]
    bound: dict[tuple[int, Action], tuple[Option, ...]] = {}  # units of one class share a tuple
    for position, action in enumerate(given or ()):
        if action is not None:
            key = (costs.unit_classes[position], action)
            if key not in bound:
                bound[key] = (option_of(costs.classes[key[0]], pace, action),)
            units[position] = bound[key]
    return Problem(fixed=costs.fixed, around=costs.around, units=tuple(units))


def option_of(unit: UnitCosts, pace: Pace, action: Action) -> Option:
    """Returns what one action costs.

    Args:
        unit: What was measured of the class.
        pace: How fast the device is.
        action: The action.

    Raises:
        ValueError: If it was not measured.
    """
    if isinstance(action, Selective):
        return listed_option(unit, pace, save=action.save)
    measured = dict(unit.actions)
    if action.name not in measured:
        raise ValueError(
            f"the action {action.name} was not measured for {unit.name}: expected one of "
            f"selective, {', '.join(measured)}."
        )
    return _option(action, measured[action.name], replay=_replay_seconds(unit, pace), pace=pace)


def options_of(
    unit: UnitCosts, pace: Pace, *, allowed: Collection[str] = LOSSLESS
) -> tuple[Option, ...]:
    """Returns the options of one class of units, from what keeps most to what keeps least.

    Args:
        unit: What was measured of the class.
        pace: How fast the device is.
        allowed: Names of the actions that may be used.

    Raises:
        ValueError: If none is left.
    """
    seconds = [pace.op_seconds(op) for op in unit.ops]
    replay = _replay_seconds(unit, pace)
    measured = dict(unit.actions)
    options = [
        _option(action, measured[action.name], replay=replay, pace=pace)
        for action in (Keep(), Recompute(), RecomputeOffload(), Offload(), Compress())
        if action.name in allowed and action.name in measured
    ]
    if "selective" in allowed and "recompute" in measured:
        options += [
            selective_option(unit, op_set, seconds=_selective_seconds(op_set, replay, pace))
            for op_set in _worthwhile_sets(unit, seconds, replay=replay, pace=pace)
            if op_set.ops
        ]
    if not options:
        raise ValueError(
            f"the class {unit.name} has none of the actions {', '.join(sorted(allowed))}: "
            f"expected one of {', '.join(measured)}, which were measured."
        )
    return tuple(sorted(options, key=lambda option: (-option.kept_bytes, option.seconds)))


def _worthwhile_sets(
    unit: UnitCosts, seconds: Sequence[float], *, replay: float, pace: Pace
) -> tuple[OpSet, ...]:
    """Returns op sets that keep less than `keep` does, which takes no time at all."""
    measured = dict(unit.actions)
    ends = [(0, pace.with_host(replay, pace.replay_seconds))]
    below = None
    if "keep" in measured:
        below = max(1, measured["keep"].kept - measured["recompute"].kept)
        ends.append((below, 0.0))
    timed = [
        TimedSet(op_set=op_set, seconds=_selective_seconds(op_set, replay, pace))
        for op_set in _candidates(unit.ops, tuple(seconds), below)
    ]
    return choose_sets(timed, ends=ends, limit=MAX_OP_SETS)


@functools.lru_cache(maxsize=16)  # the classes of a model often differ in other things than ops
def _candidates(
    ops: tuple[OpCost, ...], seconds: tuple[float, ...], below_bytes: int | None
) -> tuple[OpSet, ...]:
    corners = corner_sets(ops, seconds, below_bytes=below_bytes)
    return tuple(dict.fromkeys((*corners, *best_op_sets(ops, seconds, below_bytes=below_bytes))))


def _replay_seconds(unit: UnitCosts, pace: Pace) -> float:
    return sum(pace.op_seconds(op) for op in unit.ops if op.is_replayed)


def _selective_seconds(op_set: OpSet, replay: float, pace: Pace) -> float:
    return pace.with_host(max(0.0, replay - op_set.saved_seconds), pace.selective_seconds)


def listed_option(unit: UnitCosts, pace: Pace, *, save: Sequence[str] = DEFAULT_SAVED) -> Option:
    """Returns what `selective` with a list of ops costs.

    Args:
        unit: What was measured of the class.
        pace: How fast the device is.
        save: Names of ops, as a user writes them.
    """
    seconds = [pace.op_seconds(op) for op in unit.ops]
    replay = _replay_seconds(unit, pace)
    op_set = named_op_set(unit.ops, seconds, save)
    seconds_taken = _selective_seconds(op_set, replay, pace)
    # In a unit that has none of these ops the list is as good as `recompute`, but a list it is.
    return selective_option(unit, op_set, seconds=seconds_taken, action=Selective(save=tuple(save)))


def selective_option(
    unit: UnitCosts, op_set: OpSet, *, seconds: float, action: Selective | None = None
) -> Option:
    """Returns what keeping a set of ops costs.

    Its bytes follow from those of `recompute`: the results stay on top of what that keeps. Backward
    comes to the same bytes as there once the replay has ended, and is higher only if the replay is,
    in which results that autograd does not save wait until they are used.

    Args:
        unit: What was measured of the class.
        op_set: The ops.
        seconds: Time beyond that with `keep`.
        action: What the option is called; None: the ops by name and occurrence.
    """
    base = dict(unit.actions)["recompute"]
    chosen = set(op_set.ops)
    rise = _forward_peak(unit.ops, chosen) - _forward_peak(unit.ops, set())
    kept = base.kept + op_set.kept_bytes
    highest = max(base.kept + base.backward, base.kept + _replay_peak(unit.ops, chosen))
    if action is None:
        named = (unit.ops[i] for i in op_set.ops)
        action = Selective(save=tuple(f"{op.name}[{op.occurrence}]" for op in named))
    return Option(
        action=action,
        kept_bytes=kept,
        forward_bytes=max(kept, base.forward + rise),
        backward_bytes=max(0, highest - kept),
        gradient_bytes=base.gradient,
        seconds=seconds,
        cast_bytes=base.cast,
        late_bytes=base.late,
    )


def _forward_peak(ops: Sequence[OpCost], kept: set[int]) -> int:
    """Returns the most bytes of results that live at once in a forward that keeps these."""
    live, peak = 0, 0
    freed: dict[int, int] = {}
    for i, op in enumerate(ops):
        live += op.result_bytes
        peak = max(peak, live)
        if op.freed_after is not None and i not in kept:
            freed[op.freed_after] = freed.get(op.freed_after, 0) + op.result_bytes
        live -= freed.pop(i, 0)
    return peak


def _replay_peak(ops: Sequence[OpCost], kept: set[int]) -> int:
    """Returns the most bytes of results that live at once in a replay to which these were kept."""
    live = sum(ops[i].result_bytes for i in kept)
    peak = live
    freed: dict[int, int] = {}
    for i, op in enumerate(ops):
        if not op.is_replayed:
            continue
        live += 0 if i in kept else op.result_bytes
        peak = max(peak, live)
        if op.freed_after is not None and not op.is_saved:
            freed[op.freed_after] = freed.get(op.freed_after, 0) + op.result_bytes
        live -= freed.pop(i, 0)
    return peak


def _option(action: Action, measured: ActionBytes, *, replay: float, pace: Pace) -> Option:
    seconds = 2 * measured.moved / pace.moved_bytes_per_second if measured.moved else 0.0
    if isinstance(action, (Recompute, RecomputeOffload)):
        seconds += pace.with_host(replay, pace.replay_seconds)
    return Option(
        action=action,
        kept_bytes=measured.kept,
        forward_bytes=measured.forward,
        backward_bytes=measured.backward,
        gradient_bytes=measured.gradient,
        seconds=seconds,
        moved_bytes=measured.moved,
        cast_bytes=measured.cast,
        late_bytes=measured.late,
    )

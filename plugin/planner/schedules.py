"""Plans that people choose by hand, to compare with: every unit, every k-th, sqrt(N) segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rematic.planner.problem import Option, Problem
from rematic.policy import Recompute


def every_unit(problem: Problem, action: str) -> tuple[int, ...]:
    """Returns the assignment that gives every unit the action of that name.

    Args:
        problem: The problem.
        action: Name of the action; of several options with it the first.

    Raises:
        ValueError: If a unit has no such option.
    """
    return every_kth(problem, action, rest=action, k=1)


def every_kth(problem: Problem, action: str, *, rest: str, k: int) -> tuple[int, ...]:
    """Returns the assignment that gives units 0, k, 2k, ... one action and the others another.

    Args:
        problem: The problem.
        action: Name of the action of every k-th unit.
        rest: Name of the action of the others.
        k: Distance.

    Raises:
        ValueError: If k is below 1, or a unit has no option of the name.
    """
    if k < 1:
        raise ValueError(f"k is {k}: expected a distance of 1 or more.")
    names = [action if i % k == 0 else rest for i in range(len(problem.units))]
    return tuple(
        _position(options, name, unit=i)
        for i, (options, name) in enumerate(zip(problem.units, names, strict=True))
    )


def sqrt_segments(num_units: int) -> tuple[int, ...]:
    """Returns the lengths of about sqrt(N) segments, as equal as can be, longer ones first.

    (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1.)

    Args:
        num_units: Number of units, N.
    """
    if num_units == 0:
        return ()
    number = math.ceil(math.sqrt(num_units))
    length, longer = divmod(num_units, number)
    return tuple(length + (i < longer) for i in range(number))


def in_segments(problem: Problem, lengths: Sequence[int]) -> Problem:
    """Returns the problem in which each segment of units is one unit that is recomputed.

    In forward a segment keeps what its last unit does under `recompute` (its output, and what a
    replay needs); in backward the whole segment runs again and is kept, and then goes backward unit
    by unit. Each unit of the result has this one option. Nothing carries out such a plan: it is
    here to be compared with.

    Args:
        problem: A problem whose units all have the options `keep` and `recompute`.
        lengths: Number of units in each segment, from the first on.

    Raises:
        ValueError: If the lengths are not all above 0 or do not add up to the units, or if a unit
            lacks one of the two options.
    """
    if sum(lengths) != len(problem.units) or any(length < 1 for length in lengths):
        raise ValueError(
            f"the segments {list(lengths)} do not cover the {len(problem.units)} units: expected "
            "lengths above 0 that add up to them."
        )
    segments, start = [], 0
    for length in lengths:
        segments.append((_segment(problem, start, start + length),))
        start += length
    return replace(problem, units=tuple(segments))


def _segment(problem: Problem, start: int, stop: int) -> Option:
    """Returns the option that recomputes units `start` to before `stop` as one."""
    keep = [_named(problem, "keep", i) for i in range(start, stop)]
    recompute = [_named(problem, "recompute", i) for i in range(start, stop)]
    # Only the segment's own output stays; the outputs inside it are given up as they are used.
    rise, largest_output = 0, 0
    for option in recompute:
        rise = max(rise, largest_output + option.forward_bytes)
        largest_output = max(largest_output, option.kept_bytes)
    kept = recompute[-1].kept_bytes
    return Option(
        action=Recompute(),
        kept_bytes=kept,
        forward_bytes=rise,
        backward_bytes=max(0, _segment_backward(keep, recompute) - kept),
        gradient_bytes=sum(option.gradient_bytes for option in keep),
        seconds=sum(option.seconds for option in recompute),
        cast_bytes=sum(option.cast_bytes for option in recompute),
        late_bytes=sum(option.late_bytes for option in recompute),
    )


def _segment_backward(keep: Sequence[Option], recompute: Sequence[Option]) -> int:
    """Returns how far the backward of a segment rises above the bytes kept before it.

    The last unit need not be kept by the replay: it goes backward at once, as under `recompute`.
    """
    prefix, highest = 0, 0
    for option in keep[:-1]:
        highest = max(highest, prefix + option.forward_bytes)
        prefix += option.kept_bytes
    last = recompute[-1]
    highest = max(highest, prefix + last.kept_bytes + last.backward_bytes)
    left = last.gradient_bytes
    for option in reversed(keep[:-1]):
        highest = max(highest, prefix + left + option.backward_bytes)
        prefix -= option.kept_bytes
        left += option.gradient_bytes
    return highest


def _named(problem: Problem, action: str, unit: int) -> Option:
    return problem.units[unit][_position(problem.units[unit], action, unit=unit)]


def _position(options: Sequence[Option], action: str, *, unit: int) -> int:
    names = [option.action.name for option in options]
    if action not in names:
        raise ValueError(
            f"unit {unit} has no option {action!r}: expected one of "
            f"{', '.join(dict.fromkeys(names))}."
        )
    return names.index(action)

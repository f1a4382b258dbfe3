"""What the peak formula asks of each option, as a limit on what the units before it keep.

Of the bytes live when unit i begins only the prefix, what the units before it keep, depends on the
plan. So the peak stays within a budget C exactly if every unit's prefix is at most C less what its
own forward and backward need above it, and if the sum of all is at most C less what the head needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematic.planner.problem import Option, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A problem in the form in which it is solved; bytes above what no plan changes."""

    base: int
    """Live bytes at the first unit's start."""

    head: int
    """What the head needs above base and all that is kept, while autocast's copies of weights are
    there or afterwards."""

    around: int
    """Least budget that the intervals outside the units ask for, whatever the plan."""

    needs: tuple[tuple[int, ...], ...]
    """For each unit and option: what its forward and backward need above base and prefix."""


def limits_of(problem: Problem, *, gone_in_backward: Sequence[int] | None = None) -> Limits:
    """Returns what each option needs.

    Where options of one unit leave different gradients behind, let autocast hold different copies
    of weights, or callers hold different bytes of its input for longer than it does, the largest is
    counted.

    Args:
        problem: The problem.
        gone_in_backward: For each unit the bytes that those before it are counted to keep but have
            let go when backward comes; None: nothing.
    """
    around, fixed = problem.around, problem.fixed.total
    base = fixed + around.embedding_kept
    left = around.head_left
    held = _held(problem)
    needs: list[tuple[int, ...]] = []
    for i in range(len(problem.units) - 1, -1, -1):
        options, before = problem.units[i], held[i] - around.casts
        found = left if gone_in_backward is None else left - gone_in_backward[i]
        needs.append(tuple(_need(option, found, before) for option in options))
        left += max(option.gradient_bytes for option in options)
    after = fixed + left + around.embedding_gradient
    outside = max(
        fixed + around.embedding_forward,
        base + left + around.embedding_backward,
        after + around.optimizer,
    )
    head = max(0, around.head, around.head_uncast or 0)
    return Limits(base=base, head=head, around=outside, needs=tuple(reversed(needs)))


def _held(problem: Problem) -> list[int]:
    """Returns, for each unit, the most that is held of those before it beside what they keep."""
    held = [0]
    for options in problem.units:
        most = max(option.late_bytes + option.cast_bytes for option in options)
        held.append(max(0, held[-1] + most))
    return held[:-1]


def _need(option: Option, left: int, held: int) -> int:
    forward = max(0, held + option.forward_bytes + option.cast_bytes)
    return max(forward, left + option.kept_bytes + option.backward_bytes)

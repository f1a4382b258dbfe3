"""What the peak formula asks of each option, as a limit on what the units before it keep.

Of the bytes live when unit i begins only the prefix, what the units before it keep, depends on the
plan. So the peak stays within a budget C exactly if every unit's prefix is at most C less what its
own forward and backward need above it, and if the sum of all is at most C less what the head needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematic.planner.problem import Option, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A problem in the form in which it is solved; bytes above what no plan changes."""

    base: int
    """Live bytes at the first unit's start."""

    head: int
    """What the head needs above base and all that is kept."""

    around: int
    """Least budget that the intervals outside the units ask for, whatever the plan."""

    needs: tuple[tuple[int, ...], ...]
    """For each unit and option: what its forward and backward need above base and prefix."""


def limits_of(problem: Problem) -> Limits:
    """Returns what each option needs.

    Where options of one unit leave different gradients behind, or callers hold different bytes of
    its input for longer than it does, the largest is counted.
    """
    around, fixed = problem.around, problem.fixed.total
    base = fixed + around.embedding_kept
    left = around.head_left
    late = _late(problem)
    needs: list[tuple[int, ...]] = []
    for options, held in zip(reversed(problem.units), reversed(late), strict=True):
        needs.append(tuple(_need(option, left, held) for option in options))
        left += max(option.gradient_bytes for option in options)
    after = fixed + left + around.embedding_gradient
    outside = max(
        fixed + around.embedding_forward,
        base + left + around.embedding_backward,
        after + around.optimizer,
    )
    return Limits(base=base, head=around.head, around=outside, needs=tuple(reversed(needs)))


def _late(problem: Problem) -> list[int]:
    """Returns, for each unit, the most that callers hold of the inputs of those before it."""
    late = [0]
    for options in problem.units:
        late.append(max(0, late[-1] + max(option.late_bytes for option in options)))
    return late[:-1]


def _need(option: Option, left: int, late: int) -> int:
    return max(late + option.forward_bytes, left + option.kept_bytes + option.backward_bytes)

"""Copies of weights that autocast makes, for a program that counts one number of bytes.

Two numbers of a plan matter where there are such copies: what units keep, which backward finds, and
that with the copies of the units that do not keep theirs, which forward and the head find as well.
The second one is counted, as if all copies stayed until backward, less those of first units that
are known to be gone by then. So plans whose first units hold copies are a problem of their own, for
a few numbers of first units. What is counted is never too little: every plan fits the true problem.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from rematic.planner.limits import Limits, limits_of
from rematic.planner.problem import Option, Problem

FEW_UNITS = 8
"""Up to so many units every number of first units is tried."""

SIXTEENTHS = (0, 1, 2, 4, 8, 12, 16)
"""Of more units the numbers of first units are these parts of all."""

_Options = tuple[Option, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """A problem in one number, whose plans rise in it no less than in the true one."""

    problem: Problem
    """The problem."""

    limits: Limits
    """Its limits."""

    positions: tuple[tuple[int, ...], ...]
    """For each unit where its options stand in the true problem."""

    def original(self, assignment: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the same plan as an assignment of the true problem."""
        return tuple(self.positions[i][choice] for i, choice in enumerate(assignment))


def countings_of(problem: Problem) -> list[Counting]:
    """Returns the ways to count; without autocast there is one, which is exact.

    Args:
        problem: The problem.
    """
    if not problem.around.casts:
        every = tuple(tuple(range(len(options))) for options in problem.units)
        return [Counting(problem=problem, limits=limits_of(problem), positions=every)]
    kept = _with_copies_kept(problem)
    last = len(problem.units)
    cuts = range(last + 1) if last <= FEW_UNITS else [last * part // 16 for part in SIXTEENTHS]
    return [_cut_at(problem, kept, cut) for cut in cuts]


def _with_copies_kept(problem: Problem) -> Problem:
    """Returns the problem, with the same assignments, in which copies stay until backward."""
    around = problem.around
    known = {o: tuple(_keeping(option, around.casts) for option in o) for o in set(problem.units)}
    head = max(0, around.head - around.casts, around.head_uncast or 0)
    return replace(
        problem,
        around=replace(around, casts=0, head=head, head_uncast=None),
        units=tuple(known[options] for options in problem.units),
    )


def _keeping(option: Option, casts: int) -> Option:
    copies = option.cast_bytes
    return replace(
        option,
        kept_bytes=option.kept_bytes + copies,
        forward_bytes=max(0, option.forward_bytes + copies - casts),
        backward_bytes=max(0, option.backward_bytes - copies),
        cast_bytes=0,
    )


def _cut_at(problem: Problem, kept: Problem, cut: int) -> Counting:
    """Returns the way to count for plans whose first units hold as many copies as they can."""
    of_class = {options: _with_most_copies(options) for options in set(problem.units)}
    positions = tuple(
        of_class[options] if i < cut else tuple(range(len(options)))
        for i, options in enumerate(problem.units)
    )
    chosen: dict[tuple[_Options, tuple[int, ...]], _Options] = {}
    for key in zip(kept.units, positions, strict=True):
        chosen[key] = tuple(key[0][position] for position in key[1])
    units = tuple(chosen[key] for key in zip(kept.units, positions, strict=True))
    held = (problem.units[i][positions[i][0]].cast_bytes for i in range(cut))
    gone = [0, *itertools.accumulate(held)]
    gone += [gone[-1]] * (len(units) - cut)
    around = problem.around
    head = max(0, around.head - around.casts, (around.head_uncast or 0) - gone[-1])
    restricted = replace(kept, units=units, around=replace(kept.around, head=head))
    limits = limits_of(restricted, gone_in_backward=gone)
    return Counting(problem=restricted, limits=limits, positions=positions)


def _with_most_copies(options: _Options) -> tuple[int, ...]:
    most = max(option.cast_bytes for option in options)
    return tuple(i for i, option in enumerate(options) if option.cast_bytes == most)

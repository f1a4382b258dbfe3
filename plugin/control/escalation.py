"""What the next attempt at a micro-batch does, after one that ran out of memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematic.policy import Action, Compress, Offload, Recompute, RecomputeOffload, Tile

_LOSSLESS: tuple[Action, ...] = (Recompute(), RecomputeOffload(), Offload())
"""From lightest to heaviest."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to run a micro-batch again."""

    name: str
    """What the journal calls it."""

    action: Action | None = None
    """What happens to every unit; None: what the plan of the first attempt says."""

    in_tiles: bool = False
    """Whether token-wise parts of units run in slices."""

    num_parts: int = 1
    """Into how many parts the batch is split."""

    @property
    def is_lossy(self) -> bool:
        """Whether it may change bits."""
        return self.in_tiles or isinstance(self.action, Compress) or self.num_parts > 1


@dataclass(frozen=True, kw_only=True)
class FirstAttempt:
    """What failed first, and what may be done about it."""

    actions: tuple[Action, ...]
    """What happened to each unit."""

    armed: bool
    """Whether failed ops were run again."""

    can_arm: bool
    """Whether they may be."""

    attempts: int
    """Tries of one micro-batch, the first included."""

    may_tile: bool
    """Whether token-wise parts of units may run in slices, which adds up in another order."""

    may_compress: bool
    """Whether activations may be compressed, which is lossy."""

    max_parts: int
    """Into how many parts the batch may be split; 1 for not at all."""


def escalate(first: FirstAttempt) -> tuple[Rung, ...]:
    """Returns the attempts that follow a failed first one, in order.

    Lossless ones come before lossy ones. If there are more than the number of attempts allows, the
    lightest are left out; one lossless attempt is always among them.
    """
    room = first.attempts - 1
    lossless, lossy = _lossless(first), _lossy(first)
    num_lossy = min(len(lossy), max(room - 1, 0))
    num_lossless = min(len(lossless), room - num_lossy)
    return (*_last(lossless, num_lossless), *_last(lossy, num_lossy))


def _lossless(first: FirstAttempt) -> list[Rung]:
    found = []
    if first.can_arm and not first.armed:
        found.append(Rung(name="the same plan, failed ops run again"))
    planned = set(first.actions)
    start = max((i + 1 for i, action in enumerate(_LOSSLESS) if planned == {action}), default=0)
    found += [Rung(name=action.name, action=action) for action in _LOSSLESS[start:]]
    # the heaviest plan failed: memory may have been short for a moment only
    return found or [Rung(name="the same plan")]


def _lossy(first: FirstAttempt) -> list[Rung]:
    found = []
    if first.may_tile:
        found.append(Rung(name=Tile.name, action=RecomputeOffload(), in_tiles=True))
    if first.may_compress:
        found.append(Rung(name=Compress.name, action=Compress()))
    num_parts = 2
    while num_parts <= first.max_parts:
        name = f"{num_parts} parts, {RecomputeOffload.name}"
        found.append(Rung(name=name, action=RecomputeOffload(), num_parts=num_parts))
        num_parts *= 2
    return found


def _last(rungs: Sequence[Rung], number: int) -> Sequence[Rung]:
    return rungs[len(rungs) - number :] if number > 0 else ()

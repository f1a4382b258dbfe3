"""The actions: what happens to a unit's activations. One small class for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from rematic.policy.op_names import DEFAULT_SAVED, parse_op_name


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Activations start in memory; they may be evicted later."""

    name: ClassVar[str] = "keep"


@dataclass(frozen=True, kw_only=True)
class Selective:
    """The results of expensive ops are kept, the rest is computed again in backward.

    Random ops are never kept, whatever is named: with a kept random op before a recomputed one
    the generator would not advance, and the second would draw other numbers.
    """

    name: ClassVar[str] = "selective"

    save: tuple[str, ...] = DEFAULT_SAVED
    """Ops whose results are kept: short names, aten names, or occurrences of either."""

    def __post_init__(self) -> None:
        if not self.save:
            raise ValueError("selective keeps no op: expected at least one, or `recompute`.")
        for written in self.save:
            parse_op_name(written)


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activations are let go in forward and computed again in backward."""

    name: ClassVar[str] = "recompute"


@dataclass(frozen=True, kw_only=True)
class RecomputeOffload:
    """As `recompute`, and the unit's inputs move away until then, which long sequences need."""

    name: ClassVar[str] = "recompute+offload"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Activations move to host memory, then to disk (on a CPU at once to disk)."""

    name: ClassVar[str] = "offload"


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Activations are kept in 8 bits. Lossy: never chosen unless the user names it."""

    name: ClassVar[str] = "compress"


Action: TypeAlias = Keep | Selective | Recompute | RecomputeOffload | Offload | Compress

ACTIONS: dict[str, type[Action]] = {
    action.name: action
    for action in (Keep, Selective, Recompute, RecomputeOffload, Offload, Compress)
}
"""Every action by its name."""


def action_named(name: str, **options: Any) -> Action:
    """Returns the action called `name`.

    Raises:
        ValueError: If there is none, or it does not take the options.
    """
    if name not in ACTIONS:
        raise ValueError(f"unknown action {name!r}: expected one of {', '.join(ACTIONS)}.")
    return ACTIONS[name](**options)

"""The actions: what happens to a unit's activations. One small class for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from rematic.policy.op_names import DEFAULT_SAVED, parse_op_name

DEFAULT_TILE_TOKENS = 2048
"""Positions in a slice of `tile` unless the user gives a size or a number."""


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


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A token-wise module runs in slices of the sequence, each of them recomputed in backward.

    Gradients of weights are added up in another order: never chosen unless the user names it.
    """

    name: ClassVar[str] = "tile"

    tile_tokens: int | None = None
    """Positions in a slice; None: `DEFAULT_TILE_TOKENS`, or as `num_tiles` says."""

    num_tiles: int | None = None
    """Number of slices; None: as `tile_tokens` says."""

    dim: int = 1
    """The dimension of the sequence in every tensor, counted from the end if negative."""

    def __post_init__(self) -> None:
        if self.tile_tokens is not None and self.num_tiles is not None:
            raise ValueError(
                f"tile has tile_tokens {self.tile_tokens} and num_tiles {self.num_tiles}: expected "
                "one of them. Remove the other."
            )
        for name in ("tile_tokens", "num_tiles"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"tile has {name} {value}: expected a whole number above 0.")

    def slices_of(self, length: int) -> int:
        """Returns the number of slices for a sequence of `length` positions."""
        if self.num_tiles is not None:
            return self.num_tiles
        return max(1, -(-length // (self.tile_tokens or DEFAULT_TILE_TOKENS)))


Action: TypeAlias = Keep | Selective | Recompute | RecomputeOffload | Offload | Compress | Tile

ACTIONS: dict[str, type[Action]] = {
    action.name: action
    for action in (Keep, Selective, Recompute, RecomputeOffload, Offload, Compress, Tile)
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

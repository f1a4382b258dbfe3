"""What a recipe can say that happens to the activations of a unit.

A new action is one more class with a `name` of its own, added to `ActionConfig`; the loader picks
the class by that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rematic.recipes.field_checks import instances, require, whole_number


@dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """Activations stay in memory until they are evicted."""

    name: Literal["keep"] = "keep"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class SelectiveConfig:
    """The results of chosen ops stay in memory, the rest is computed again in backward."""

    name: Literal["selective"] = "selective"
    """Tells the action from the others."""
    save: tuple[str, ...] = ()
    """Ops whose results stay, such as matmul or attention; empty (default): the expensive ones."""

    def __post_init__(self) -> None:
        instances(self, "save", kind=str, remedy="write names of ops such as [matmul, attention]")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations are dropped in forward and computed again in backward."""

    name: Literal["recompute"] = "recompute"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class RecomputeOffloadConfig:
    """As recompute, and the inputs of the units move to host memory or disk until then."""

    name: Literal["recompute+offload"] = "recompute+offload"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Activations move to host memory, then to disk (on a CPU at once to disk)."""

    name: Literal["offload"] = "offload"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Activations are kept in 8 bits, which is lossy; needs bitsandbytes."""

    name: Literal["compress"] = "compress"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A token-wise module runs in slices of the sequence, which are recomputed in backward."""

    name: Literal["tile"] = "tile"
    """Tells the action from the others."""
    tile_tokens: int | None = None
    """Positions in a slice; None (default): 2048, or as num_tiles says."""
    num_tiles: int | None = None
    """Number of slices; None (default): as tile_tokens says."""
    dim: int = 1
    """Dimension of the sequence in every tensor, from the end if negative; default 1."""

    def __post_init__(self) -> None:
        whole_number(self, "tile_tokens", minimum=1, optional=True, remedy="write null for 2048")
        whole_number(
            self, "num_tiles", minimum=1, optional=True, remedy="write null to go by tile_tokens"
        )
        whole_number(self, "dim", minimum=-8, maximum=7, remedy="write 1 for (batch, seq, dim)")
        require(
            self,
            "num_tiles",
            self.tile_tokens is None or self.num_tiles is None,
            expected=f"null, since tile_tokens is {self.tile_tokens}",
            remedy="remove one of the two",
        )


ActionConfig: TypeAlias = (
    KeepConfig
    | SelectiveConfig
    | RecomputeConfig
    | RecomputeOffloadConfig
    | OffloadConfig
    | CompressConfig
    | TileConfig
)
"""What can happen to a unit's activations; a recipe may write `action: keep` for the name alone."""

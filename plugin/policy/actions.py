"""The actions: what happens to a unit's activations. One small class for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Activations start in memory; they may be evicted later."""

    name: ClassVar[str] = "keep"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activations are let go in forward and computed again in backward."""

    name: ClassVar[str] = "recompute"


Action = Keep | Recompute

ACTIONS: dict[str, type[Keep] | type[Recompute]] = {"keep": Keep, "recompute": Recompute}
"""Every action by its name."""


def action_named(name: str) -> Action:
    """Returns the action called `name`.

    Raises:
        ValueError: If there is none.
    """
    if name not in ACTIONS:
        raise ValueError(f"unknown action {name!r}: expected one of {', '.join(ACTIONS)}.")
    return ACTIONS[name]()

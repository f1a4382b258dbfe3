"""What the record of one call runs, in forward and in replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rematic.activations.record import Record
from rematic.activations.routing import RoutedBody
from rematic.activations.token_wise_parts import BodyInSlices, TokenWiseParts

if TYPE_CHECKING:
    from rematic.activations.unit import Unit


def bodies_of(unit: Unit, *, has_cache: bool) -> list[Callable[..., Any]]:
    """Returns what runs inside what; the record runs the last one.

    Args:
        unit: The unit.
        has_cache: Whether results of ops are kept, which replays find again by counting ops.
    """
    forward = unit.original
    if unit.tiling is not None:
        forward = unit.tiling.body(forward)
    elif unit.parts is not None and not has_cache and _may_be_asked(unit, unit.parts):
        forward = unit.parts.body(forward, unit)
    if unit.routing is None:
        return [forward]
    return [forward, RoutedBody(forward, unit.routing, unit.ledger.unpack)]


def _may_be_asked(unit: Unit, parts: TokenWiseParts) -> bool:
    """Returns whether a proof of its parts can leave nothing behind, as far as is known.

    A unit whose first call has not ended is taken at its word where slices are to help now.
    """
    if unit.pinned is not None or unit.joint is not None or unit.refused:
        return False
    return not parts.only_asks or not (unit.is_first_call or unit.awaits_check)


def give_to(record: Record, bodies: Sequence[Callable[..., Any]]) -> None:
    """Tells those bodies whose record it is that must know it."""
    for body in bodies:
        if isinstance(body, RoutedBody | BodyInSlices):
            body.belong_to(record)

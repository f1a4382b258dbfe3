"""What a run found out about its units, grouped for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NoticeSummary:
    """What was told of some units in the same words."""

    kind: str
    """What it is about."""
    units: tuple[str, ...]
    """Names of the units, in the order in which they were told of."""
    text: str
    """What was said last of the first of them."""


def summarize_notices(events: Iterable[Mapping[str, Any]]) -> tuple[NoticeSummary, ...]:
    """Groups `notice` events by kind and by their words, whatever numbers stand in them.

    Args:
        events: The events in the order in which they were written.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for event in events:
        kind, unit, text = (str(event.get(key, "")) for key in ("kind", "unit", "text"))
        words = "".join(letter for letter in text.replace(unit, "") if not letter.isdigit())
        groups.setdefault((kind, words), {})[unit] = text
    return tuple(
        NoticeSummary(kind=kind, units=tuple(texts), text=next(iter(texts.values())))
        for (kind, _), texts in groups.items()
    )

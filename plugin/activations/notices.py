"""What a unit has to say that a table of bytes does not show: refusals, reordered sums, errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def words_of(text: str) -> str:
    """Returns a sentence without its digits.

    Sizes and shapes differ from call to call where lengths do; what is said once is said once
    whatever numbers stand in it.
    """
    return "".join(letter for letter in text if not letter.isdigit())


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One thing that was found out about a unit."""

    unit: str
    """Name of the unit."""

    kind: str
    """What it is about: the name of an action, `kept`, `call`, ..."""

    text: str
    """The finding as a sentence, without the name of the unit."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers that belong to it, by name."""

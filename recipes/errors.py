"""The one error of the room, and the hint that its messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecipeError(ValueError):
    """A recipe cannot be used as written; the text says where, what was expected, what to do.

    Each line of the text is one problem and begins with its place: `file:line:column`, or
    `override 1: key=value`.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """A question naming the known word nearest to `word`, to append; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""

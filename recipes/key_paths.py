"""Paths to a value inside a recipe: `policy.rules[0].match`, `model.config['a.b']`."""

from __future__ import annotations

import re
from typing import TypeAlias

from rematic.recipes.tree import Key

KeyPath: TypeAlias = "tuple[Key, ...]"
"""Names, and whole numbers for places in a list (counted from 0)."""

_NAME = r"\w[\w-]*"
_SEGMENT = re.compile(
    rf"(?:(?P<dot>\.)?(?P<name>{_NAME})|\[(?P<index>[0-9]{{1,6}})\]"
    r"|\['(?P<single>[^']+)'\]|\[\"(?P<double>[^\"]+)\"\])"
)


def format_path(path: KeyPath) -> str:
    """Write a path as `parse_path` reads it; the empty path is the empty text."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif re.fullmatch(_NAME, key):
            text += f".{key}" if text else key
        else:
            text += f'["{key}"]' if "'" in key else f"['{key}']"
    return text


def parse_path(text: str) -> KeyPath:
    """Read a path.

    Raises:
        ValueError: the text is not a path.
    """
    path: list[Key] = []
    position = 0
    while position < len(text):
        match = _SEGMENT.match(text, position)
        # A dot stands between names: required before every name but the first.
        if match is None or (match["name"] is not None and bool(match["dot"]) != bool(path)):
            break
        position = match.end()
        path.append(_key(match))
    if position < len(text) or not path:
        raise ValueError(
            f"{text!r} is not a path to a value; expected names joined by dots, with the place in a"
            " list as [0], such as training.epochs or policy.rules[0].match"
        )
    return tuple(path)


def _key(match: re.Match[str]) -> Key:
    if match["index"] is not None:
        return int(match["index"])
    return match["name"] or match["single"] or match["double"]

"""The tree of a recipe's text: every key and every value knows where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value was written."""

    source: str
    """A file, `override 1: key=value`, or `default`."""
    line: int | None = None
    """Line in the file, the first is 1; None where there is no line."""
    column: int | None = None
    """Column in the line, in characters, the first is 1; None where there is no line."""

    def __str__(self) -> str:
        if self.line is None:
            return self.source
        return f"{self.source}:{self.line}:{self.column}"


PlainScalar: TypeAlias = "str | int | float | bool | None"
"""What one value of a recipe can be."""

Key: TypeAlias = "str | int"
"""A key of a mapping; the schema knows names only, a free mapping may have whole numbers."""


@dataclass(frozen=True, kw_only=True)
class TreeScalar:
    """A single value."""

    value: PlainScalar
    """The value by the core schema of YAML 1.2."""
    origin: Origin
    """Where the value was written."""


@dataclass(frozen=True, kw_only=True)
class TreeList:
    """A list."""

    items: tuple[Tree, ...]
    """The values in order."""
    origin: Origin
    """Where the list begins."""


@dataclass(frozen=True, kw_only=True)
class TreeEntry:
    """What stands under one key."""

    key_origin: Origin
    """Where the key was written."""
    value: Tree
    """The value of the key."""


@dataclass(frozen=True, kw_only=True)
class TreeMap:
    """A mapping."""

    entries: Mapping[Key, TreeEntry]
    """The entries in the order in which they were written."""
    origin: Origin
    """Where the mapping begins."""


Tree: TypeAlias = "TreeScalar | TreeList | TreeMap"
"""Any of the three."""


def plain(tree: Tree) -> object:
    """The values alone: dicts, lists and scalars."""
    if isinstance(tree, TreeMap):
        return {key: plain(entry.value) for key, entry in tree.entries.items()}
    if isinstance(tree, TreeList):
        return [plain(item) for item in tree.items]
    return tree.value

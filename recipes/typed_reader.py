"""Turns a tree into the frozen dataclasses of a schema, strictly and with places.

OmegaConf's structured configs do not serve here: they take the text `no` for false and the number
7 for text, leave mappings inside a tuple of dataclasses unread (a misspelt key passes), stop at
the first problem, and do not know where a value was written.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from rematic.recipes.errors import RecipeError, nearest
from rematic.recipes.field_checks import FieldError, spelled
from rematic.recipes.key_paths import KeyPath, format_path
from rematic.recipes.tree import Origin, Tree, TreeEntry, TreeList, TreeMap, TreeScalar, plain

_T = TypeVar("_T")
Parser: TypeAlias = Callable[["str | int | float"], object]
"""Reads a class that is written as one value; raises ValueError."""

DEFAULT = Origin(source="default")
"""Origin of a value that nobody wrote."""

_UNUSABLE = object()
"""Stands for a value whose problem has been noted."""


def read_tree(
    schema: type[_T],
    tree: TreeMap,
    *,
    noun: str,
    parsers: Mapping[type, Parser],
    other_keys: Collection[str] = (),
) -> tuple[_T, dict[str, Origin]]:
    """Read a tree as one dataclass; also the origin of every value, defaults included, by path.

    `noun` names the whole in messages, `other_keys` are keys of the whole that are no fields but
    worth naming there. Unions of dataclasses are told apart by their field `name`, which may stand
    alone: `action: keep` for `action: {name: keep}`.

    Raises:
        RecipeError: unknown keys, wrong types, values that the dataclasses refuse; a line for each.
    """
    reader = _Reader(noun=noun, parsers=parsers, other_keys=other_keys)
    value = reader.read(schema, tree, ())
    if reader.problems:
        raise RecipeError("\n".join(reader.problems))
    assert isinstance(value, schema)  # else there would be a problem
    return value, reader.origins


class _Reader:
    """Reads values by their annotations; collects problems and origins."""

    def __init__(
        self, *, noun: str, parsers: Mapping[type, Parser], other_keys: Collection[str]
    ) -> None:
        self.problems: list[str] = []
        self.origins: dict[str, Origin] = {}
        self._noun = noun
        self._parsers = parsers
        self._other_keys = other_keys

    def read(self, annotation: object, tree: Tree, path: KeyPath) -> object:
        """The value that a tree stands for, or `_UNUSABLE`."""
        kinds = get_args(annotation) if _is_union(annotation) else (annotation,)
        if type(None) in kinds and isinstance(tree, TreeScalar) and tree.value is None:
            return self._leaf(None, tree, path)
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) > 1:
            return self._read_member(kinds, tree, path)
        return self._read_kind(kinds[0], tree, path)

    def _read_kind(self, kind: object, tree: Tree, path: KeyPath) -> object:
        origin = get_origin(kind)
        if origin is Literal:
            return self._read_choice(get_args(kind), tree, path)
        if origin is tuple:
            return self._read_items(get_args(kind)[0], tree, path)
        if origin is Mapping:
            return self._read_free(tree, path)
        assert isinstance(kind, type), f"no reader for the annotation {kind}"
        if kind in self._parsers:
            return self._parse(self._parsers[kind], tree, path)
        if dataclasses.is_dataclass(kind):
            return self._read_dataclass(kind, tree, path)
        return self._read_scalar(kind, tree, path)

    # One dataclass

    def _read_dataclass(self, schema: type, tree: Tree, path: KeyPath) -> object:
        if not isinstance(tree, TreeMap):
            return self._expected("keys and values; remove the key, or write {}", tree, path)
        hints = get_type_hints(schema)
        values: dict[str, object] = {}
        for key, entry in tree.entries.items():
            name = str(key)
            if name in hints:
                values[name] = self.read(hints[name], entry.value, (*path, name))
            else:
                values[name] = self._unknown_key((*path, key), entry.key_origin, known=hints)
        complete = self._has_required(schema, tree, path)
        if not complete or _UNUSABLE in values.values():
            return _UNUSABLE
        return self._build(schema, values, tree, path)

    def _unknown_key(self, path: KeyPath, origin: Origin, *, known: Collection[str]) -> object:
        where = format_path(path[:-1]) or self._noun
        known = known if len(path) > 1 else (*self._other_keys, *known)
        return self._refuse(
            origin,
            f"{format_path(path)} is an unknown key{nearest(str(path[-1]), known)};"
            f" the keys of {where} are {', '.join(known)}",
        )

    def _has_required(self, schema: type, tree: TreeMap, path: KeyPath) -> bool:
        missing = [
            field.name
            for field in dataclasses.fields(schema)
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in tree.entries
        ]
        for name in missing:
            self._refuse(tree.origin, f"{format_path((*path, name))} is missing; write it")
        return not missing

    def _build(
        self, schema: type, values: Mapping[str, object], tree: TreeMap, path: KeyPath
    ) -> object:
        build: Callable[..., object] = schema
        try:
            config = build(**values)
        except FieldError as error:
            rest = str(error).removeprefix(error.field)
            where = format_path((*path, *error.field.split(".")))
            return self._refuse(_place_of(error.field, tree), where + rest)
        for field in dataclasses.fields(schema):
            if field.name not in values:
                self._note_default(getattr(config, field.name), (*path, field.name))
        return config

    def _note_default(self, value: object, path: KeyPath) -> None:
        if dataclasses.is_dataclass(value) and type(value) not in self._parsers:
            for field in dataclasses.fields(value):
                self._note_default(getattr(value, field.name), (*path, field.name))
        elif isinstance(value, tuple) and value:
            for index, item in enumerate(value):
                self._note_default(item, (*path, index))
        else:
            self.origins[format_path(path)] = DEFAULT

    # One of several dataclasses

    def _read_member(self, kinds: Collection[object], tree: Tree, path: KeyPath) -> object:
        members = {name: kind for kind in kinds for name in _member_names(kind)}
        if isinstance(tree, TreeScalar):
            entry = TreeEntry(key_origin=tree.origin, value=tree)
            tree = TreeMap(entries={"name": entry}, origin=tree.origin)
        if not isinstance(tree, TreeMap) or "name" not in tree.entries:
            names = ", ".join(members)
            return self._expected(f"a name alone, or keys with a name, of: {names}", tree, path)
        name = self._read_choice(tuple(members), tree.entries["name"].value, (*path, "name"))
        if not isinstance(name, str):
            return _UNUSABLE
        return self._read_kind(members[name], tree, path)

    # Lists and free mappings

    def _read_items(self, kind: object, tree: Tree, path: KeyPath) -> object:
        if not isinstance(tree, TreeList):
            return self._expected("a list; write [] around one value", tree, path)
        if not tree.items:
            return self._leaf((), tree, path)
        items = tuple(
            self.read(kind, item, (*path, index)) for index, item in enumerate(tree.items)
        )
        return _UNUSABLE if _UNUSABLE in items else items

    def _read_free(self, tree: Tree, path: KeyPath) -> object:
        if not isinstance(tree, TreeMap):
            return self._expected("keys and values; remove the key, or write {}", tree, path)
        wrong = [key for key in tree.entries if not isinstance(key, str)]
        for key in wrong:
            self._refuse(
                tree.entries[key].key_origin,
                f"{format_path((*path, key))} is a number as a key; expected a name",
            )
        self._note_free(tree, path)
        return _UNUSABLE if wrong else plain(tree)

    def _note_free(self, tree: Tree, path: KeyPath) -> None:
        if isinstance(tree, TreeMap) and tree.entries:
            for key, entry in tree.entries.items():
                self._note_free(entry.value, (*path, key))
        elif isinstance(tree, TreeList) and tree.items:
            for index, item in enumerate(tree.items):
                self._note_free(item, (*path, index))
        else:
            self._leaf(None, tree, path)

    # Single values

    def _read_choice(self, choices: tuple[str, ...], tree: Tree, path: KeyPath) -> object:
        value = tree.value if isinstance(tree, TreeScalar) else None
        if isinstance(value, str) and value in choices:
            return self._leaf(value, tree, path)
        near = nearest(value, choices) if isinstance(value, str) else ""
        return self._expected(f"one of {', '.join(choices)}{near}", tree, path)

    def _parse(self, parser: Parser, tree: Tree, path: KeyPath) -> object:
        if not isinstance(tree, TreeScalar) or tree.value is None:
            return self._expected("a single value; remove the key for the default", tree, path)
        try:
            return self._leaf(parser(tree.value), tree, path)
        except ValueError as error:
            return self._refuse(tree.origin, f"{format_path(path)}: {error}")

    def _read_scalar(self, kind: type, tree: Tree, path: KeyPath) -> object:
        value = tree.value if isinstance(tree, TreeScalar) else None
        if type(value) is kind:
            return self._leaf(value, tree, path)
        if kind is float and type(value) is int and abs(value) < 2**63:
            return self._leaf(float(value), tree, path)
        return self._expected(_SCALAR_WORDS[kind], tree, path)

    # What is noted

    def _leaf(self, value: object, tree: Tree, path: KeyPath) -> object:
        self.origins[format_path(path)] = tree.origin
        return value

    def _expected(self, what: str, tree: Tree, path: KeyPath) -> object:
        where = format_path(path) or self._noun
        return self._refuse(tree.origin, f"{where} is {_describe(tree)}; expected {what}")

    def _refuse(self, origin: Origin, text: str) -> object:
        self.problems.append(f"{origin}: {text}")
        return _UNUSABLE


_SCALAR_WORDS: Mapping[type, str] = {
    bool: "a truth value; write true or false",
    int: "a whole number; write its digits alone, such as 1024",
    float: "a number; write for example 0.5",
    str: "text; write it in quotes",
}


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _member_names(kind: object) -> tuple[str, ...]:
    return get_args(get_type_hints(kind)["name"])


def _place_of(path: str, tree: TreeMap) -> Origin:
    """Where the value of a field is written, `section.key` for one of another section."""
    here: Tree = tree
    for key in path.split("."):
        entry = here.entries.get(key) if isinstance(here, TreeMap) else None
        if entry is None:
            break
        here = entry.value
    return here.origin


def _describe(tree: Tree) -> str:
    if isinstance(tree, TreeMap):
        return f"a mapping with the keys {', '.join(map(str, tree.entries))}"
    if isinstance(tree, TreeList):
        return f"a list of {len(tree.items)} items"
    kinds = {str: " (text)", int: " (a whole number)", float: " (a number with a fraction)"}
    return spelled(tree.value) + kinds.get(type(tree.value), "")

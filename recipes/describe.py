"""Writes a recipe back as YAML, on request with the place of every value."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping

import yaml

from rematic.recipes.budget import Budget
from rematic.recipes.key_paths import KeyPath, format_path
from rematic.recipes.schema import Recipe
from rematic.recipes.tree import Key, Origin


def recipe_as_plain(recipe: Recipe) -> dict[str, object]:
    """The recipe as dicts, lists and scalars, every field of it written out."""
    return {field.name: _plain(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}


def differences_as_plain(recipe: Recipe) -> dict[str, object]:
    """What of the recipe differs from a recipe of defaults, as a file would say it."""
    return _differences(recipe, Recipe())


def format_plain(values: Mapping[str, object]) -> str:
    """Dicts, lists and scalars as YAML that loads to the same values, by any version of YAML."""
    return "".join(f"{text}\n" for text, _ in _lines(dict(values), path=(), indent=""))


def format_recipe(recipe: Recipe, *, origins: Mapping[str, Origin] | None = None) -> str:
    """The resolved recipe as YAML that loads to the same recipe, by any version of YAML.

    With `origins`, as `load_recipe_with_origins` returns them, each value carries a comment that
    says where it was written.
    """
    if origins is None:
        return format_plain(recipe_as_plain(recipe))
    lines = list(_lines(recipe_as_plain(recipe), path=(), indent=""))
    width = min(max(len(text) for text, _ in lines), 48)
    commented = (
        f"{text:{width}}  # {origins[path]}" if path in origins else text for text, path in lines
    )
    return "".join(f"{line}\n" for line in commented)


def _differences(value: object, default: object) -> dict[str, object]:
    """Fields of a dataclass that are not those of the default; of a choice its name as well."""
    assert dataclasses.is_dataclass(value)
    found: dict[str, object] = {}
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        if mine == other and (field.name != "name" or isinstance(value, Recipe)):
            continue
        is_section = dataclasses.is_dataclass(mine) and type(mine) is type(other)
        same = is_section and not isinstance(mine, Budget)
        found[field.name] = _differences(mine, other) if same else _plain(mine)
    return found


def _plain(value: object) -> object:
    if isinstance(value, Budget):
        return value.value if value.kind == "fraction" else str(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _lines(value: object, *, path: KeyPath, indent: str) -> Iterator[tuple[str, str]]:
    """Lines of a block, each with the path of the value that stands on it, empty if none does."""
    items: list[tuple[str, Key, object]] = []
    if isinstance(value, dict):
        items = [(f"{_scalar(key)}:", key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [("-", index, item) for index, item in enumerate(value)]
    for head, key, item in items:
        below = (*path, key)
        if not isinstance(item, (dict, list)) or not item:
            yield f"{indent}{head} {_scalar(item)}", format_path(below)
            continue
        lines = _lines(item, path=below, indent=indent + "  ")
        if head == "-":
            first, place = next(lines)
            yield f"{indent}- {first.lstrip()}", place
        else:
            yield f"{indent}{head}", ""
        yield from lines


def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _WORDS:
        return value
    style = '"' if isinstance(value, str) else None
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=sys.maxsize)
    return text.removesuffix("...\n").strip()


_PLAIN_TEXT = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_./ -]*[A-Za-z0-9_./-])?|[0-9]+(?:[KMGT]i)?B")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
"""Text that some version of YAML takes for a value of another type."""

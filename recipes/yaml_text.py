"""Reads YAML text into a tree, by the rules of YAML 1.2 and without what makes YAML surprising.

Plain scalars resolve by the core schema of YAML 1.2.2 (section 10.3.2): `no` and `on` are text,
`010` is ten, `12:30:45` is text, `3e-4` is a number. Refused, each with its place: anchors,
aliases and merge keys (`extends:` replaces them), tags, duplicate keys, and `${...}` (no value of
the environment may slip into a recipe).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import yaml

from rematic.recipes.errors import RecipeError
from rematic.recipes.tree import (
    Key,
    Origin,
    PlainScalar,
    Tree,
    TreeEntry,
    TreeList,
    TreeMap,
    TreeScalar,
)

MAX_DEPTH = 20
"""Levels of nesting a text may have."""


def parse_yaml(text: str, *, source: str) -> Tree | None:
    """Read the text of the file `source`; None if it holds no value at all.

    Raises:
        RecipeError: the text is not YAML, or uses what the module's docstring says is refused.
    """

    def locate(mark: yaml.Mark) -> Origin:
        return Origin(source=source, line=mark.line + 1, column=mark.column + 1)

    return _parse(text, whole=Origin(source=source), locate=locate)


def parse_yaml_value(text: str, *, origin: Origin) -> Tree:
    """Read a value that stands in no file; all of it gets the one origin, no text is null.

    Raises:
        RecipeError: as `parse_yaml`.
    """
    tree = _parse(text, whole=origin, locate=lambda mark: origin)
    return TreeScalar(value=None, origin=origin) if tree is None else tree


def _parse(text: str, *, whole: Origin, locate: Callable[[yaml.Mark], Origin]) -> Tree | None:
    try:
        # compose() builds nodes and no objects: no constructor of the loader runs.
        node = yaml.compose(text, Loader=_CoreSchemaLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = whole if mark is None else locate(mark)
        raise RecipeError(f"{origin}: {_explain(error)}") from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"{whole}: YAML cannot hold one of the characters ({reason}); remove it, or write it"
            ' as an escape in double quotes, such as "\\x07"'
        ) from error
    return None if node is None else _convert(node, locate=locate)


class _NotSupportedError(yaml.MarkedYAMLError):
    """Valid YAML that a recipe may not use."""


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "unknown problem"
    if isinstance(error, _NotSupportedError):
        return problem
    context = f" ({error.context})" if error.context and error.problem else ""
    hint = ""
    if error.context == "while scanning an alias":
        hint = "; text that begins with * needs quotes, such as '*.layers.*'"
    return f"not valid YAML: {problem}{context}{hint}"


class _CoreSchemaLoader(yaml.SafeLoader):
    """Composes nodes that carry the tags of YAML 1.2; refuses anchors, tags and deep nesting."""

    # In place of the resolvers of YAML 1.1; those of 1.2 are added below the class.
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]  # its stub
        problem = _refusal(event) or (_TOO_DEEP if self._depth >= MAX_DEPTH else None)
        if problem is not None:
            mark = event.start_mark
            assert isinstance(mark, yaml.Mark)  # the loader is the one written in Python
            raise _NotSupportedError(problem=problem, problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TOO_DEEP = (
    f"nested more than {MAX_DEPTH} levels deep; no recipe needs that, check the brackets and the"
    " indentation"
)


def _refusal(event: yaml.NodeEvent) -> str | None:
    if event.anchor is not None:
        sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
        return (
            f"{sign}{event.anchor}: anchors and aliases are not supported; write the value out, or"
            " move what is shared to a recipe and name it by extends (text that begins with"
            f" {sign} needs quotes)"
        )
    tag = getattr(event, "tag", None)  # an alias has none
    if tag is not None:
        return (
            f"{tag.replace(_TAG, '!!')}: tags are not supported; remove the tag, the value alone"
            " says its type (text that begins with ! needs quotes)"
        )
    return None


_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _CoreSchemaLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def _convert(node: yaml.Node, *, locate: Callable[[yaml.Mark], Origin]) -> Tree:
    origin = locate(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return TreeMap(entries=_convert_entries(node, locate=locate), origin=origin)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(item, locate=locate) for item in node.value)
        return TreeList(items=items, origin=origin)
    return TreeScalar(value=_scalar_value(node, origin=origin), origin=origin)


def _convert_entries(
    node: yaml.MappingNode, *, locate: Callable[[yaml.Mark], Origin]
) -> dict[Key, TreeEntry]:
    entries: dict[Key, TreeEntry] = {}
    for key_node, value_node in node.value:
        origin = locate(key_node.start_mark)
        key = _key(key_node, origin=origin)
        if key in entries:
            raise RecipeError(
                f"{origin}: the key {key!r} is written twice (first at"
                f" {entries[key].key_origin}); keep one of the two"
            )
        entries[key] = TreeEntry(key_origin=origin, value=_convert(value_node, locate=locate))
    return entries


def _key(node: yaml.Node, *, origin: Origin) -> Key:
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{origin}: a list or a mapping stands as a key; expected a name")
    if node.value == "<<" and node.style is None:
        raise RecipeError(
            f"{origin}: merge keys (<<) are not supported; write the keys out, or move what is"
            " shared to a recipe and name it by extends"
        )
    key = _scalar_value(node, origin=origin)
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise RecipeError(
            f"{origin}: the key {node.value or 'null'} is not a name; write it in quotes if it is"
            " meant as text"
        )
    return key


def _scalar_value(node: yaml.Node, *, origin: Origin) -> PlainScalar:
    text = str(node.value)
    if "${" in text:
        raise RecipeError(
            f"{origin}: {text!r} holds ${{, but recipes have no interpolation; write the value out,"
            " or give it as an override key=value"
        )
    name = node.tag.removeprefix(_TAG)
    if name == "null":
        return None
    if name == "bool":
        return text.lower() == "true"
    if name == "int":
        return _whole_number(text, origin=origin)
    return _number(text) if name == "float" else text


def _whole_number(text: str, *, origin: Origin) -> int:
    try:
        # Not base 0: Python refuses 010 there, YAML 1.2 reads it as ten.
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        return int(text, base)
    except ValueError as error:  # more digits than Python converts
        raise RecipeError(
            f"{origin}: a whole number of {len(text)} digits is too long; write fewer digits"
        ) from error


def _number(text: str) -> float:
    special = text.lower().lstrip("+-")
    if special in (".inf", ".nan"):
        value = math.inf if special == ".inf" else math.nan
        return -value if text.startswith("-") else value
    return float(text)

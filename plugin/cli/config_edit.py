"""Edits the toggle in the text of an Accelerate config: its own lines and no others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from rematic.cli.accelerate_file import SECTION

INDENT = "  "
_NOTHING = ("", "~", "null")
_NOT_EDITED = (
    f"{SECTION} could not be edited in this text; expected keys and values. Edit it by hand"
)


@dataclass(frozen=True, kw_only=True)
class _Splice:
    """A piece of text that takes the place of another."""

    start: int
    end: int
    text: str


def edit_section(text: str, values: dict[str, bool | str]) -> str:
    """Returns the text of a config with keys of `recompute_config` set.

    Comments, order and everything else stay. The section is appended if there is none. A text that
    begins with a brace is taken for JSON, whatever the file is called: Accelerate writes such.

    Args:
        text: The text of the file.
        values: Values by key.

    Raises:
        ValueError: If the text cannot be edited so.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    try:
        edited = text.replace("\r\n", "\n")
        for key, value in values.items():
            edited = _set(edited, key, value)
        wanted = _with_values(yaml.safe_load(text), values)
        is_done = yaml.safe_load(edited) == wanted
    except yaml.YAMLError as error:
        raise ValueError(f"{_NOT_EDITED} ({error})") from error
    if not is_done:
        raise ValueError(_NOT_EDITED)
    return edited.replace("\n", newline)


def _with_values(config: object, values: dict[str, bool | str]) -> dict[str, Any]:
    """Returns what a config says once the values are set in it."""
    present = dict(config) if isinstance(config, dict) else {}
    section = present.get(SECTION)
    return {**present, SECTION: {**(section if isinstance(section, dict) else {}), **values}}


def _set(text: str, key: str, value: bool | str) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and not isinstance(root, MappingNode):
        raise ValueError("the file holds no keys; expected those of an Accelerate config")
    as_json = root is not None and bool(root.flow_style)
    written = _written(value, as_json=as_json)
    splice = _splice(text, root, key, written, as_json=as_json)
    return text[: splice.start] + splice.text + text[splice.end :]


def _splice(text: str, root: MappingNode | None, key: str, value: str, *, as_json: bool) -> _Splice:
    section = None if root is None else _entry(root, SECTION)
    if section is None:
        return _new_section(text, root, key, value, as_json=as_json)
    name, held = section
    if isinstance(held, MappingNode):
        entry = _entry(held, key)
        if entry is not None:
            return _in_place_of(text, entry[1], value)
        return _new_key(text, held, key, value, as_json=as_json)
    if not isinstance(held, ScalarNode) or held.value not in _NOTHING:
        raise ValueError(_NOT_EDITED)
    if held.value:
        return _in_place_of(text, held, f"{{{json.dumps(key) if as_json else key}: {value}}}")
    # `recompute_config:` with nothing behind it
    end = text.find("\n", name.end_mark.index)
    end = len(text) if end < 0 else end
    return _Splice(start=end, end=end, text=f"\n{INDENT}{key}: {value}")


def _in_place_of(text: str, node: Node, value: str) -> _Splice:
    start, end = node.start_mark.index, node.end_mark.index
    newline = "\n" if text[start:end].endswith("\n") else ""  # as the lines of a `>` or `|` end
    return _Splice(start=start, end=end, text=value + newline)


def _new_section(
    text: str, root: MappingNode | None, key: str, value: str, *, as_json: bool
) -> _Splice:
    if not as_json:
        newline = "" if not text or text.endswith("\n") else "\n"
        added = f"{newline}{SECTION}:\n{INDENT}{key}: {value}\n"
        return _Splice(start=len(text), end=len(text), text=added)
    assert root is not None
    start = root.value[-1][1].end_mark.index if root.value else root.start_mark.index + 1
    comma = "," if root.value else ""
    added = f'{comma}\n{INDENT}"{SECTION}": {{"{key}": {value}}}'
    return _Splice(start=start, end=start, text=added)


def _new_key(text: str, held: MappingNode, key: str, value: str, *, as_json: bool) -> _Splice:
    if held.flow_style:
        start = held.start_mark.index + 1
        name = f'"{key}"' if as_json else key
        comma = ", " if held.value else ""
        return _Splice(start=start, end=start, text=f"{name}: {value}{comma}")
    first = held.value[0][0].start_mark
    indent = text[first.index - first.column : first.index]
    return _Splice(start=first.index, end=first.index, text=f"{key}: {value}\n{indent}")


def _entry(mapping: MappingNode, key: str) -> tuple[Node, Node] | None:
    for name, value in mapping.value:
        if isinstance(name, ScalarNode) and name.value == key:
            return name, value
    return None


def _written(value: bool | str, *, as_json: bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        is_plain = yaml.safe_load(f"[{value}]") == [value]
    except yaml.YAMLError:
        is_plain = False
    return value if is_plain and not as_json else json.dumps(value)

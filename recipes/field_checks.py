"""Checks of one field of a config, for its `__post_init__`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

_LARGEST_INT = 2**63 - 1
"""The largest whole number that torch and the system take."""

_FLOAT_END = 2.0**128
"""No number in 32 bits is as large."""

_FOLDER_NAME = re.compile(r"\w(?:[\w .+-]{0,98}[\w+-])?")


class FieldError(ValueError):
    """The value of one field is not usable; the text begins with the name of the field."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field
        """Name of the field, or the path to one of another section, for its place in the file."""


def spelled(value: object) -> str:
    """A value as a recipe spells it, cut to what a message can hold."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def require(config: object, field: str, ok: bool, *, expected: str, remedy: str) -> None:
    """Raise a `FieldError` about a field of `config` unless `ok`."""
    if not ok:
        value = spelled(getattr(config, field))
        raise FieldError(f"{field} is {value}; expected {expected}; {remedy}", field=field)


def whole_number(
    config: object,
    field: str,
    *,
    minimum: int,
    remedy: str,
    maximum: int | None = None,
    optional: bool = False,
) -> None:
    """Require a whole number within the bounds; `optional` allows None."""
    value = getattr(config, field)
    if value is None and optional:
        return
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if maximum is None and is_number and value > _LARGEST_INT:
        maximum = _LARGEST_INT
    ok = is_number and value >= minimum
    expected = f"a whole number of at least {minimum}"
    if maximum is not None:
        ok = ok and value <= maximum
        expected = f"a whole number from {minimum} to {maximum}"
    require(config, field, ok, expected=expected, remedy=remedy)


def positive_number(config: object, field: str, *, remedy: str, optional: bool = False) -> None:
    """Require a finite number above 0; `optional` allows None."""
    if getattr(config, field) is None and optional:
        return
    ok = _is_finite(config, field) and getattr(config, field) > 0
    expected = f"a finite number above 0{_bound(config, field)}"
    require(config, field, ok, expected=expected, remedy=remedy)


def number_from_zero(
    config: object, field: str, *, remedy: str, below: float | None = None
) -> None:
    """Require a finite number of at least 0 and, if given, below a bound."""
    ok = _is_finite(config, field) and getattr(config, field) >= 0
    expected = f"a finite number of at least 0{_bound(config, field)}"
    if below is not None:
        ok = ok and getattr(config, field) < below
        expected = f"a number of at least 0 and below {below:g}"
    require(config, field, ok, expected=expected, remedy=remedy)


def _is_finite(config: object, field: str) -> bool:
    value = getattr(config, field)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -_FLOAT_END < value < _FLOAT_END


def _bound(config: object, field: str) -> str:
    """Words for what a number is above although it is finite."""
    value = getattr(config, field)
    is_large = isinstance(value, float) and _FLOAT_END <= value < math.inf
    return " and below 2**128, as 32 bits hold it" if is_large else ""


def true_or_false(config: object, field: str) -> None:
    """Require a bool."""
    ok = isinstance(getattr(config, field), bool)
    require(config, field, ok, expected="a truth value", remedy="write true or false")


def one_of(config: object, field: str, *, choices: Collection[str], remedy: str) -> None:
    """Require one of the given words."""
    ok = getattr(config, field) in choices
    require(config, field, ok, expected=f"one of {', '.join(choices)}", remedy=remedy)


def some_text(config: object, field: str, *, remedy: str, optional: bool = False) -> None:
    """Require text that is not blank; `optional` allows None."""
    value = getattr(config, field)
    if value is None and optional:
        return
    ok = isinstance(value, str) and bool(value.strip())
    require(config, field, ok, expected="text that is not blank", remedy=remedy)


def folder_name(config: object, field: str, *, optional: bool = False) -> None:
    """Require text that can name a folder on any system; `optional` allows None."""
    value = getattr(config, field)
    if value is None and optional:
        return
    require(
        config,
        field,
        isinstance(value, str) and _FOLDER_NAME.fullmatch(value) is not None,
        expected="1 to 100 letters, digits, spaces and . _ + -, the first a letter or digit",
        remedy="write a name that a folder can have, such as tiny-cpu",
    )


def instance(config: object, field: str, *, kind: type | tuple[type, ...], remedy: str) -> None:
    """Require an instance of a class, or of one of several."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = f"an instance of {' or '.join(one.__name__ for one in kinds)}"
    require(
        config, field, isinstance(getattr(config, field), kinds), expected=expected, remedy=remedy
    )


def instances(config: object, field: str, *, kind: type, remedy: str) -> None:
    """Require a tuple of instances of one class."""
    value = getattr(config, field)
    ok = isinstance(value, tuple) and all(isinstance(item, kind) for item in value)
    require(config, field, ok, expected=f"a tuple of {kind.__name__}", remedy=remedy)


def plain_mapping(config: object, field: str) -> None:
    """Require a mapping of what YAML can hold: text, numbers, truth values, null, nested."""
    value = getattr(config, field)
    require(
        config,
        field,
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and _is_plain(value),
        expected="names with plain values: text, numbers, truth values, null, lists and mappings",
        remedy="write other values as transformers writes them to JSON, such as 'bfloat16'",
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        keys = all(isinstance(key, (str, int)) for key in value)
        return keys and all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float))

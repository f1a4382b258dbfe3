"""Whether a value that was read from outside is what its annotations say, all the way down."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def untyped(value: object, kind: Any, *, where: str = "it") -> str | None:  # noqa: ANN401 - a type
    """Returns what is of another type than was annotated, None if nothing is.

    Knows what frozen values are made of: numbers, texts, tuples, mappings, unions, literals, named
    tuples and dataclasses. A whole number counts as a real one, a truth value as no number.

    Args:
        value: The value.
        kind: What its type should be, as an annotation.
        where: What the value is called.

    Returns:
        Such as "history.entries[0].step is 'x': expected int".
    """
    return next(_faults(value, kind, where), None)


def _faults(value: object, kind: Any, where: str) -> Iterator[str]:  # noqa: ANN401 - a type
    origin, given = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [one for one in given if one is not NoneType]
        if value is None and len(kinds) < len(given):
            return
        if len(kinds) == 1:
            yield from _faults(value, kinds[0], where)
        elif all(any(_faults(value, one, where)) for one in kinds):
            yield _fault(value, kind, where)
    elif origin is Literal:
        if value not in given:
            yield _fault(value, kind, where)
    elif origin is tuple and isinstance(value, tuple):
        yield from _faults_of_tuple(value, given, where)
    elif origin is not None and isinstance(value, Mapping) and issubclass(origin, Mapping):
        for key, item in value.items():
            yield from _faults(key, given[0], f"a key of {where}")
            yield from _faults(item, given[1], f"{where}[{key!r}]")
    elif not _is(value, kind if origin is None else origin):
        yield _fault(value, kind, where)
    else:
        for name, field_kind in _fields(kind if origin is None else origin).items():
            yield from _faults(getattr(value, name), field_kind, f"{where}.{name}")


def _faults_of_tuple(
    value: tuple[object, ...], kinds: tuple[Any, ...], where: str
) -> Iterator[str]:
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        yield f"{where} has {len(value)} items: expected {len(kinds)}"
        return
    for number, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        yield from _faults(item, kind, f"{where}[{number}]")


def _fault(value: object, kind: Any, where: str) -> str:  # noqa: ANN401 - a type
    expected = getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)
    return f"{where} is {value!r}: expected {expected}"


def _is(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type
    if kind is Any:
        return True
    if kind in (None, NoneType):
        return value is None
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(
            value, bool
        )
    return isinstance(value, kind)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a type
    """Returns the annotations of a named tuple or a dataclass, none of anything else."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = list(getattr(kind, "_fields", ()))
    hints = get_type_hints(kind) if names else {}
    return {name: hints[name] for name in names}

"""Walks the tensors of nested arguments and rebuilds their containers."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

# Arguments of a module are whatever its author passes; only containers and tensors are looked at.
Nested = Any
T = TypeVar("T")
Leaf: TypeAlias = type | tuple[type, ...]
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""What most arguments are that are no tensors: looked at no further."""
_PLAIN = _ATOMS | {torch.Size, torch.layout, torch.memory_format, slice, range}


def map_leaves(fn: Callable[[Any], Nested], value: T, *, leaf: Leaf = torch.Tensor) -> T:
    """Returns `value` with `fn` applied to every `leaf` and every container built anew.

    Tuples, named tuples, lists, dictionaries (subclasses too) and dataclass instances are entered;
    anything else, `None` included, is returned as it is.
    """
    return _map(fn, value, leaf)  # type: ignore[no-any-return]


def iter_leaves(value: Nested, *, leaf: Leaf = torch.Tensor) -> Iterator[Any]:
    """Yields every `leaf` inside `value`, in the order in which `map_leaves` meets them."""
    if isinstance(value, leaf):
        yield value
    elif type(value) in _ATOMS:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_leaves(item, leaf=leaf)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_leaves(item, leaf=leaf)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_leaves(getattr(value, field.name, None), leaf=leaf)


def iter_others(value: Nested) -> Iterator[Any]:
    """Yields everything inside `value` that is no tensor, no container and no plain value."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, (tuple, list)):
        inside: Iterable[Nested] = value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    for item in inside:
        yield from iter_others(item)


def _map(fn: Callable[[Any], Nested], value: Nested, leaf: Leaf) -> Nested:
    if isinstance(value, leaf):
        return fn(value)
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple):
        return _mapped_tuple(fn, value, leaf)
    if isinstance(value, list):
        items = [_map(fn, item, leaf) for item in value]
        if type(value) is list:
            return items
        rebuilt = copy.copy(value)
        rebuilt[:] = items
        return rebuilt
    if isinstance(value, Mapping):
        return _mapped_mapping(fn, value, leaf)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_dataclass(fn, value, leaf)
    return value


def _mapped_tuple(
    fn: Callable[[Any], Nested], value: tuple[Nested, ...], leaf: Leaf
) -> tuple[Nested, ...]:
    if type(value) is tuple:
        return tuple(_map(fn, item, leaf) for item in value)
    if hasattr(value, "_fields"):
        return type(value)(*(_map(fn, item, leaf) for item in value))
    if hasattr(value, "n_sequence_fields"):  # what torch.max and others return
        return type(value)([_map(fn, item, leaf) for item in value])
    return value  # torch.Size and the like hold no tensors; their constructors are unknown


def _mapped_mapping(fn: Callable[[Any], Nested], value: Mapping[Any, Nested], leaf: Leaf) -> Nested:
    items = {key: _map(fn, item, leaf) for key, item in value.items()}
    if type(value) is dict:
        return items
    try:
        rebuilt = copy.copy(value)
        for key, item in items.items():
            rebuilt[key] = item  # type: ignore[index]
    except TypeError:  # read-only: nobody will miss its own type
        return items
    return rebuilt


def _mapped_dataclass(fn: Callable[[Any], Nested], value: Nested, leaf: Leaf) -> Nested:
    rebuilt = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            # frozen dataclasses refuse plain assignment
            object.__setattr__(rebuilt, field.name, _map(fn, getattr(value, field.name), leaf))
    return rebuilt


class ContainerContents:
    """What the containers inside a call's arguments held before it, to be put back in place.

    A unit may fill a list or dictionary of its caller; when its forward failed and runs again, what
    the failed attempt put there goes.
    """

    def __init__(self, values: Iterable[Nested]) -> None:
        self._contents: list[tuple[Nested, dict[Any, Nested] | list[Nested]]] = []
        for value in values:
            self._read(value)

    def restore(self) -> None:
        """Puts the contents of every container that has changed back."""
        for container, contents in self._contents:
            if isinstance(contents, list):
                container[:] = contents
            elif isinstance(container, Mapping):
                _restore_items(container, contents)
            else:
                for name, value in contents.items():
                    object.__setattr__(container, name, value)

    def is_changed(self) -> bool:
        """Returns whether a container holds something else than it did."""
        return any(not _same_items(container, contents) for container, contents in self._contents)

    def _read(self, value: Nested) -> None:
        inside: Iterable[Nested] = ()
        if type(value) in _ATOMS or isinstance(value, torch.Tensor):
            return
        if isinstance(value, list):
            inside = list(value)
            self._contents.append((value, inside))
        elif isinstance(value, tuple):
            inside = value
        elif isinstance(value, Mapping):
            self._contents.append((value, dict(value)))
            inside = value.values()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            held = {name: getattr(value, name) for name in names if hasattr(value, name)}
            self._contents.append((value, held))
            inside = held.values()
        for item in inside:
            self._read(item)


def _same_items(container: Nested, contents: dict[Any, Nested] | list[Nested]) -> bool:
    if isinstance(contents, list):
        return len(container) == len(contents) and all(map(operator.is_, container, contents))
    if not isinstance(container, Mapping):  # a dataclass
        missing = object()
        return all(getattr(container, n, missing) is value for n, value in contents.items())
    return container.keys() == contents.keys() and all(
        container[key] is value for key, value in contents.items()
    )


def _restore_items(container: Nested, contents: dict[Any, Nested]) -> None:
    for key in [key for key in container if key not in contents]:
        del container[key]
    for key, value in contents.items():
        if key not in container or container[key] is not value:
            container[key] = value

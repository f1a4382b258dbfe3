"""What the methods of a module's class can reach by name: globals, and attributes of the class."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from rematic.activations.kept_values import is_plain_object

MAX_CALLS = 2
"""How many functions deep the globals are followed."""


class Place(NamedTuple):
    """Where a value stands that methods of a class reach by name."""

    label: str
    """What to call it."""
    home: Any
    """The class whose attribute it is, or the globals of a module."""
    name: str
    """Its name there."""


def attribute_places(kind: type) -> Iterator[Place]:
    """Yields where a class and its bases below `nn.Module` hold values, but methods."""
    for base in _own_bases(kind):
        for name, value in vars(base).items():
            if not name.startswith("__") and not callable(value) and not _is_descriptor(value):
                yield Place(f"{base.__name__}.{name}", base, name)


def global_places(kind: type) -> Iterator[Place]:
    """Yields where the globals stand that the methods of a class name and that can change."""
    for function in _functions_of(kind):
        for name in _names(function.__code__):
            if _can_change(function.__globals__.get(name), function):
                label = f"global {function.__module__}.{name}"
                yield Place(label, function.__globals__, name)


def asks_whether_replayed(kind: type) -> bool:
    """Returns whether the methods of a class ask `rematic.replaying`, and so guard what they do."""
    return any("replaying" in _names(function.__code__) for function in _functions_of(kind))


def host_generators_of(kind: type) -> frozenset[str]:
    """Returns which of `HOST_GENERATORS` the methods of a class name: they may draw from them."""
    found = set()
    for function in _functions_of(kind):
        names = _names(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            home = value if isinstance(value, types.ModuleType) else _home_of(value)
            if home is random:
                found.add("random")
            elif _is_numpy_random(home) or (_is_numpy(home) and "random" in names):
                found.add("numpy.random")
    return frozenset(found)


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    waiting = [(f, 0) for base in _own_bases(kind) for f in map(_function, vars(base).values())]
    seen: set[int] = set()
    while waiting:
        function, depth = waiting.pop()
        if function is None or id(function) in seen or _room(function.__module__) == "torch":
            continue
        seen.add(id(function))
        yield function
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            near = isinstance(value, types.FunctionType) and (
                _room(value.__module__) == _room(function.__module__)
            )
            if near and depth < MAX_CALLS:
                waiting.append((_function(value), depth + 1))


def _home_of(value: Any) -> types.ModuleType | None:
    """Returns the module whose global generator a function belongs to, as `random.random` does."""
    owner = getattr(value, "__self__", None)
    if owner is getattr(random.random, "__self__", random):
        return random
    is_legacy = type(owner).__name__ == "RandomState"
    return sys.modules.get("numpy.random") if is_legacy else None


def _is_numpy(home: types.ModuleType | None) -> bool:
    return home is not None and home.__name__ == "numpy"


def _is_numpy_random(home: types.ModuleType | None) -> bool:
    return home is not None and home.__name__ == "numpy.random"


def _own_bases(kind: type) -> list[type]:
    return [
        base
        for base in kind.__mro__
        if base not in nn.Module.__mro__ and _room(base.__module__) != "torch"
    ]


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _can_change(value: Any, function: types.FunctionType) -> bool:
    if isinstance(value, (list, dict, set, torch.Generator, random.Random, torch.Tensor)):
        return True
    # of the type: some objects claim to have every attribute, and native libraries look it up
    if any(hasattr(type(value), name) for name in ("popleft", "bit_generator", "tobytes")):
        return True
    if isinstance(value, (bool, int, float, str)):
        return True
    return is_plain_object(value) and _room(type(value).__module__) == _room(function.__module__)


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "__get__") or hasattr(value, "__set__")


def _room(module: str | None) -> str:
    return (module or "").partition(".")[0]

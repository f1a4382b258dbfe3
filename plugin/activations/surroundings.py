"""What a unit's forward changes where no replay puts it back.

A replay restores what the modules of the unit hold, and gives them new containers for the arguments
(`module_state`, `arguments`). A forward can also reach objects of its caller, closures, globals,
attributes of classes. What it leaves there, a replay would leave a second time, or in the place of
the first: a unit that does so is found out before anything is replayed.
"""

from __future__ import annotations

import array
import functools
import logging
import operator
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from rematic.activations.functions_inside import (
    Place,
    asks_whether_replayed,
    attribute_places,
    global_places,
)
from rematic.activations.kept_values import CONTAINERS, is_constant, is_plain_object, version_of
from rematic.activations.module_walk import OF_EVERY_MODULE
from rematic.activations.outside_state import OutsideWatch

MAX_VALUES = 20_000
"""Values that are looked at; what lies beyond is taken for unchanged."""
MAX_BYTES = 1 << 20
"""Arrays above this size are taken for unchanged."""

# Any: whatever the author of a module or its caller keeps, and what tells whether it has changed.
Value: TypeAlias = Any
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SKIPPED = (
    *(nn.Module, type, types.ModuleType, logging.Logger, torch.dtype, torch.device),
    *(types.CodeType, types.FrameType),
)
_DEEPEST = 2
"""How many objects deep, from an attribute of a module on, nothing is restored any more."""
_ITERATORS = ("builtins", "itertools")


class Surroundings:
    """What the forward of a unit can reach beyond what a replay restores, read before a call.

    Args:
        module: The unit.
        call: Positional and keyword arguments.
        left_out: Modules inside it that replays leave out.
    """

    def __init__(
        self,
        module: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        left_out: Collection[nn.Module] = (),
    ) -> None:
        self._module = module
        self._call = call
        self._left_out = left_out
        self._places: list[Place] = []
        self._before = self._read()

    def change(self) -> str | None:
        """Returns what the call has changed, None if nothing is known to have changed.

        What is made once and used from then on (caches, what was None before) does not count,
        unless it is a number, which may be a count, or a graph hangs on it.
        """
        now = self._read()
        for name, (value, token) in now.items():
            before = self._before.get(name)
            if before is None or before[0] is None:
                if _may_count(value):
                    return name
            elif before[1] != token:
                return name
        return next((name for name in self._before if name not in now), None)

    def watch(self) -> OutsideWatch:
        """Returns what reads before each later call what was found, arguments left out."""
        values = [
            (label, value)
            for label, (value, _) in self._before.items()
            if not label.startswith("argument ")
        ]
        return OutsideWatch(self._places, values)

    def _read(self) -> dict[str, tuple[Value, Value]]:
        found: dict[str, tuple[Value, Value]] = {}
        seen: set[int] = set()
        waiting = deque(self._roots())
        while waiting and len(found) < MAX_VALUES:
            name, value = waiting.popleft()
            if isinstance(value, _SKIPPED) or _is_ours(value) or name in found:
                continue
            if isinstance(value, _SCALARS):
                found[name] = value, (type(value), repr(value))
            elif id(value) not in seen:
                seen.add(id(value))
                # with the value, so that no other comes to have its number in the meantime
                found[name] = value, _token(value)
                waiting.extend(_inside(name, value))
        return found

    def _roots(self) -> Iterator[tuple[str, Value]]:
        if any(map(asks_whether_replayed, set(map(type, self._module.modules())))):
            return  # its author has seen to it
        for i, value in enumerate(self._call[0]):
            yield from _passed(f"argument {i}", value)
        for key, value in self._call[1].items():
            yield from _passed(f"argument {key!r}", value)
        kinds: dict[type, None] = {}
        for path, part in self._module.named_modules():
            if part in self._left_out:
                continue
            kinds[type(part)] = None
            for key, value in part.__dict__.items():
                if key not in OF_EVERY_MODULE:
                    yield from _not_restored(f"attribute {f'{path}.{key}'.lstrip('.')!r}", value)
        self._places = [place for kind in kinds for place in _places_of(kind)]
        for place in self._places:
            home = place.home if isinstance(place.home, dict) else vars(place.home)
            yield place.label, home.get(place.name)


def _places_of(kind: type) -> Iterator[Place]:
    yield from attribute_places(kind)
    yield from global_places(kind)


def _may_count(value: Value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _passed(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """Yields what lies in an argument, without the containers that a replay makes anew."""
    if isinstance(value, (torch.Tensor, torch.Generator, *_SCALARS)):
        return
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _passed(f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _passed(f"{name}[{key!r}]", item)
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from _passed(f"{name}.{key}", getattr(value, key, None))
    else:
        yield name, value


def _not_restored(name: str, value: Value, *, depth: int = 0) -> Iterator[tuple[str, Value]]:
    """Yields what lies in an attribute, without what every replay restores.

    Args:
        name: What to call it.
        value: What it holds.
        depth: In how many objects it lies; those in containers are taken for the deepest.
    """
    if isinstance(value, (torch.Tensor, *_SCALARS)) and depth < _DEEPEST:
        return
    if is_constant(value) and depth < _DEEPEST:
        return
    if type(value) in CONTAINERS or isinstance(value, tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            if not isinstance(item, (torch.Tensor, *_SCALARS)):
                yield from _not_restored(f"{name}[{key!r}]", item, depth=_DEEPEST)
    elif depth < _DEEPEST and is_plain_object(value):
        for key, item in vars(value).items():
            if not isinstance(item, (torch.Tensor, *_SCALARS)):
                inner = depth + 1 if is_plain_object(item) else _DEEPEST
                yield from _not_restored(f"{name}.{key}", item, depth=inner)
    elif depth == _DEEPEST or not isinstance(value, torch.Generator):
        yield name, value


def _token(value: Value) -> Value:
    """Returns what is equal before and after as long as a value has not changed by itself.

    (Types are asked for attributes, as some objects claim to have every one: native libraries.)
    """
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if hasattr(type(value), "bit_generator"):  # of NumPy, which need not be installed
        return repr(value.bit_generator.state)
    if type(value).__name__ == "RandomState":
        return repr(value.get_state(legacy=False))
    if hasattr(type(value), "__array_interface__") and hasattr(type(value), "tobytes"):
        return value.tobytes() if value.nbytes <= MAX_BYTES else None
    if isinstance(value, array.array):
        return value.tobytes()
    if isinstance(value, (list, tuple, deque, bytearray)):
        return type(value), len(value), [id(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), {id(item) for item in value}
    if hasattr(value, "__next__") and type(value).__module__ in _ITERATORS:
        left = operator.length_hint(value, -1)
        return object() if left < 0 and "(" not in repr(value) else (left, repr(value))
    return id(value)


def _inside(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """Yields what a value holds."""
    if isinstance(value, (torch.Tensor, torch.Generator, random.Random)):
        return
    if isinstance(value, (list, tuple, deque)):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, (dict, types.MappingProxyType)):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, functools.partial):
        yield from ((f"{name}.{key}", getattr(value, key)) for key in ("func", "args", "keywords"))
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from _contents_of(f"{name}:{key}", cell)
    if not isinstance(value, types.FunctionType):
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            yield from ((f"{name}.{key}", item) for key, item in held.items())
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                yield f"{name}.{key}", getattr(value, key, None)


def _contents_of(name: str, cell: types.CellType) -> Iterator[tuple[str, Value]]:
    try:
        yield name, cell.cell_contents
    except ValueError:  # empty
        return


def _is_ours(value: Value) -> bool:
    room = type(value).__module__.partition(".")[0]
    return room == "rematic" or (
        room == "torch" and not isinstance(value, (torch.Tensor, torch.Generator))
    )

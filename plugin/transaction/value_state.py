"""What values hold, at whatever depth, before a step that may fail.

Containers, objects, tensors in them, generators, arrays and iterators. Everything is put back in
place, so that whoever holds a part of it sees the same. Classes of torch and of its hosts are not
looked into: they keep their objects up to date themselves.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from rematic.activations.kept_values import (
    CLONED_BUFFER_BYTES,
    is_plain_object,
    put_values_back,
    version_of,
)
from rematic.activations.nested import iter_leaves
from rematic.transaction.outside_torch import GENERATORS, StateOutsideTorch, is_iterator

LARGE = 10_000
"""Containers with more entries are not looked into, and copied where they were seen to change."""
CONTAINERS = (list, dict, set, collections.deque, bytearray, array.array)
"""Types of containers; those derived from them count."""
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_FRAMEWORKS = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed"}
    | {"transformers", "rematic", "bitsandbytes", "torchao", "hqq", "gptqmodel", "awq"}
)

# Any: whatever the author of a module or of a batch keeps.
Value: TypeAlias = Any


Held: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, int]
"""A tensor, its copy where it is small, and its in-place counter."""


class ValueState:
    """The state of some values at one moment.

    Args:
        enters: Tells of a class whether its objects are looked into.
        may_change: Tells of a name whether what is large under it is copied.
        known: What an earlier state held, by the identity of the tensor: what has not changed since
            is not copied again.
    """

    def __init__(
        self,
        enters: Callable[[type], bool] = lambda kind: True,
        *,
        may_change: Callable[[str], bool] = lambda name: True,
        known: Mapping[int, Held] = MappingProxyType({}),
    ) -> None:
        self.modules: list[nn.Module] = []
        """Modules that were met: their own state is not read here."""
        self.leaves: list[torch.Tensor] = []
        """Tensors that need a gradient and were made by nobody."""
        self.outside: list[StateOutsideTorch] = []
        """Generators, arrays and iterators."""
        self.tensors: dict[int, Held] = {}
        """What is held of each tensor, by its identity."""
        self._enters, self._may_change, self._known = enters, may_change, known
        self._contents: list[tuple[Value, Value, str]] = []
        self._uncopied: list[tuple[Value, int, str]] = []
        self._attributes: list[tuple[Value, dict[str, Value]]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._seen: set[int] = set()

    def read(self, value: Value, name: str) -> None:
        """Reads a value and all that it holds.

        Args:
            value: The value.
            name: What to call it.
        """
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            self._read_tensor(value)
        elif isinstance(value, tuple):
            self._read_all(value, name)
        elif isinstance(value, CONTAINERS):
            self._seen.add(id(value))
            self._read_container(value, name)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        else:
            self._seen.add(id(value))
            self._read_other(value, name)

    def enters(self, value: Value) -> bool:
        """Returns whether an object is looked into."""
        kind = type(value)
        if room_of(kind) in _FRAMEWORKS or not self._enters(kind):
            return False
        return is_plain_object(value) or _has_slots(kind)

    def obstacle(self) -> str | None:
        """Returns what was changed and cannot be put back, None if there is nothing."""
        for tensor, clone, version in self.tensors.values():
            if clone is None and version_of(tensor) != version:
                return f"a tensor of shape {tuple(tensor.shape)} that an attribute holds"
        return next((f"{name!r}" for c, n, name in self._uncopied if len(c) != n), None)

    def changed_names(self) -> set[str]:
        """Returns under which names something large has changed."""
        changed = {name for container, number, name in self._uncopied if len(container) != number}
        large = [(c, before, name) for c, before, name in self._contents if len(before) > LARGE]
        changed |= {name for c, before, name in large if not _holds(c, before)}
        return changed | {state.name for state in self.outside if state.is_changed()}

    def leave_graphs(self) -> None:
        """Leaves out what a graph hangs on."""
        self._contents = [entry for entry in self._contents if not has_graph(entry[1])]
        self._attributes = [entry for entry in self._attributes if not has_graph(entry[1])]

    def restore(self) -> None:
        """Puts everything back."""
        for container, contents, _ in self._contents:
            _refill(container, contents)
        for value, attributes in self._attributes:
            _give_attributes(value, attributes)
        for tensor, clone, _ in self.tensors.values():
            if clone is not None:
                put_values_back(tensor, clone)
        for generator, state in self._generators:
            generator.set_state(state)
        for outside in self.outside:
            outside.restore()

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            if tensor.is_leaf:
                self.leaves.append(tensor)
            return
        version, known = version_of(tensor), self._known.get(id(tensor))
        if known is None or known[0] is not tensor or version != known[2] or version < 0:
            small = tensor.numel() * tensor.element_size() <= CLONED_BUFFER_BYTES
            known = tensor, tensor.clone() if small and not tensor.is_nested else None, version
        self.tensors[id(tensor)] = known

    def _read_container(self, container: Value, name: str) -> None:
        if len(container) > LARGE and not self._may_change(name):
            self._uncopied.append((container, len(container), name))
            return
        self._contents.append((container, _plain_copy(container), name))
        if not isinstance(container, (bytearray, array.array)):
            self._read_all(container.values() if isinstance(container, dict) else container, name)
        if hasattr(container, "__dict__"):
            self._read_attributes(container, name)

    def _read_all(self, values: Collection[Value], name: str) -> None:
        for value in values if len(values) <= LARGE else ():
            if type(value) not in _ATOMS:
                self.read(value, name)
                if is_iterator(value) and not is_plain_object(value):
                    self.outside.append(StateOutsideTorch(_nothing, name, can_restore=False))

    def _read_other(self, value: Value, name: str) -> None:
        if isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, GENERATORS):
            self.outside.append(StateOutsideTorch.of_generator(value, name))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= CLONED_BUFFER_BYTES or self._may_change(name):
                self.outside.append(StateOutsideTorch.of_array(value, name))
        elif isinstance(value, Mapping) and not is_plain_object(value):
            self._read_all(list(value.values()), name)
        elif self.enters(value):
            self._read_attributes(value, name)

    def _read_attributes(self, value: Value, name: str) -> None:
        attributes = _attributes_of(value)
        self._attributes.append((value, attributes))
        for key, item in attributes.items():
            if type(item) in _ATOMS:
                continue
            if is_iterator(item) and not is_plain_object(item) and hasattr(value, "__dict__"):
                self.outside.append(StateOutsideTorch.of_iterator(value.__dict__, key))
            else:
                self.read(item, f"{name}.{key}")


def has_graph(value: Value) -> bool:
    """Returns whether a value holds a tensor that was computed from others with a gradient."""
    return any(tensor.grad_fn is not None for tensor in iter_leaves(value))


def _nothing() -> None:
    """Puts back what cannot be: it is refused before."""


def _plain_copy(container: Value) -> Value:
    if isinstance(container, dict):
        return list(dict.items(container))
    return bytes(container) if isinstance(container, bytearray) else list(container)


def _refill(container: Value, contents: Value) -> None:
    # the methods of the base classes: those of a subclass may do more
    if isinstance(container, collections.OrderedDict):
        collections.OrderedDict.clear(container)
        for key, value in contents:
            collections.OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, contents)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    elif isinstance(container, collections.deque):
        collections.deque.clear(container)
        collections.deque.extend(container, contents)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    elif isinstance(container, bytearray):
        container[:] = contents
    else:
        container[:] = array.array(container.typecode, contents)


def _holds(container: Value, contents: Value) -> bool:
    now = _plain_copy(container)
    return len(now) == len(contents) and all(
        all(map(is_, a, b)) if isinstance(container, dict) else a is b
        for a, b in zip(now, contents, strict=True)
    )


def _attributes_of(value: Value) -> dict[str, Value]:
    held = dict(getattr(value, "__dict__", {}))
    for name in _slots(type(value)):
        if hasattr(value, name):
            held[name] = getattr(value, name)
    return held


def _give_attributes(value: Value, attributes: dict[str, Value]) -> None:
    home = getattr(value, "__dict__", None)
    slots = set(_slots(type(value)))
    if home is not None:
        for name in [name for name in home if name not in attributes]:
            del home[name]
        home.update({k: v for k, v in attributes.items() if k not in slots})
    for name in slots:
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was written in Python


def _has_slots(kind: type) -> bool:
    flags: Any = kind
    return bool(flags.__flags__ & _HEAP_TYPE) and any(True for _ in _slots(kind))


def room_of(kind: type) -> str:
    """Returns the package in which a class was written."""
    return kind.__module__.partition(".")[0]

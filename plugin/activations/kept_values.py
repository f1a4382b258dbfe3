"""Copies of what modules keep in containers and in objects, taken before a forward."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CONTAINERS = frozenset(
    {list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict}
    | {collections.Counter}
)
"""Types whose instances are copied, at whatever depth they lie in one another."""

CLONED_BUFFER_BYTES = 1 << 16
"""Buffers up to this size are cloned before every forward; larger ones once they were seen to
change. (BatchNorm changes its statistics without raising `_version`, so versions alone miss it.)"""

# Any: whatever the author of a module keeps in its attributes.
Value = Any


def copied(value: Value, *, leaf: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Value:
    """Returns a container with every container inside it copied too; other values as they are.

    Args:
        value: The container.
        leaf: What to put in the place of each tensor, None for the tensor itself.
    """
    kind = type(value)
    if kind is tuple:
        return tuple(copied(item, leaf=leaf) for item in value)
    if kind not in CONTAINERS:
        return leaf(value) if leaf is not None and isinstance(value, torch.Tensor) else value
    result: Any = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            result[key] = copied(item, leaf=leaf)
    elif kind is not set:  # which holds nothing that can change
        for i, item in enumerate(value):
            result[i] = copied(item, leaf=leaf)
    return result


def same_contents(before: Value, now: Value) -> bool:
    """Returns whether two values hold the same: tensors by their bits, others by equality."""
    kind = type(before)
    if before is now or kind is not type(now):
        return before is now
    if isinstance(before, torch.Tensor):
        same_kind = (before.shape, before.dtype) == (now.shape, now.dtype)
        return same_kind and torch.equal(before, now)
    if isinstance(before, Mapping):
        return before.keys() == now.keys() and all(same_contents(before[k], now[k]) for k in before)
    if kind is tuple or (kind in CONTAINERS and kind is not set):
        return len(before) == len(now) and all(map(same_contents, before, now))
    return bool(before == now) if kind in (bool, int, float, str, bytes, set) else False


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same memory that keeps no graph alive."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def is_plain_object(value: Value) -> bool:
    """Returns whether `value` is made of its attributes alone, so that these are its state."""
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and kind.__flags__ & _HEAP_TYPE != 0
        and isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (nn.Module, type))
        # a copy that dies would give up what the object still uses
        and not hasattr(kind, "__del__")
    )


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was written in Python


@dataclass(slots=True)
class ObjectState:
    """One attribute that is an object of a class of its author's own, as forward saw it.

    What was None is left alone: the first forward of quantized layers makes what they need from
    weights that are gone afterwards. The object itself is known only until its forward has ended,
    since it may come to hold an output.
    """

    home: dict[str, Any]
    name: str
    full_name: str
    original: Value
    contents: dict[str, Any]

    @classmethod
    def read(cls, home: dict[str, Any], name: str, full_name: str) -> ObjectState:
        """Copies the attributes of the object called `name`."""
        value = home[name]
        known = {key: item for key, item in vars(value).items() if item is not None}
        return cls(home, name, full_name, value, copied(known, leaf=_cloned))

    def changed(self) -> bool:
        """Returns whether the same object stands there and its attributes are others now."""
        there = self.home.get(self.name)
        return there is self.original and self.differs(there)

    def differs(self, there: Value) -> bool:
        """Returns whether an object has other attributes than the one that was read."""
        now = vars(there)
        return any(
            key in now and not same_contents(value, now[key])
            for key, value in self.contents.items()
        )

    def restore(self) -> None:
        """Puts the object back with the attributes it had, after a forward that failed."""
        self.home[self.name] = self.original
        self.original.__dict__.update(copied(self.contents, leaf=_cloned))

    def show(self) -> None:
        """Puts an object in its place that looks as it did."""
        there = self.home.get(self.name)
        if is_plain_object(there):
            shown = object.__new__(type(there))
            shown.__dict__.update(vars(there))
            shown.__dict__.update(copied(self.contents, leaf=_cloned))
            self.home[self.name] = shown

    def leave_graph(self) -> None:
        """Lets go of everything that could keep a graph alive."""
        self.original = None
        self.contents = copied(self.contents, leaf=without_graph)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    # one that needs a gradient is computed anew and not counted up in place
    large = tensor.numel() * tensor.element_size() > CLONED_BUFFER_BYTES
    return tensor if tensor.requires_grad or large else tensor.clone()

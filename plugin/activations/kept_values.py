"""Copies of what modules keep in containers and in objects, taken before a forward."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Mapping
from operator import is_
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

PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of attributes that are kept by their value."""

_CONSTANT = frozenset({complex, bytes, range, torch.dtype, torch.device, torch.Size}) | PLAIN

# Any: whatever the author of a module keeps in its attributes.
Value = Any


def is_constant(value: Value) -> bool:
    """Returns whether nothing in a value can change: numbers and the like, tuples of them."""
    kind = type(value)
    return kind in _CONSTANT or (isinstance(value, tuple) and all(map(is_constant, value)))


def copied(value: Value, *, leaf: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Value:
    """Returns a container with every container inside it copied too; other values as they are.

    Args:
        value: The container.
        leaf: What to put in the place of each tensor, None for the tensor itself.
    """
    kind = type(value)
    if isinstance(value, tuple):
        items = [copied(item, leaf=leaf) for item in value]
        make: Any = getattr(kind, "_make", kind)  # named tuples take their fields apart
        return value if all(map(is_, items, value)) else make(items)
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
    if isinstance(before, tuple) or (kind in CONTAINERS and kind is not set):
        return len(before) == len(now) and all(map(same_contents, before, now))
    return bool(before == now) if kind in (bool, int, float, str, bytes, set) else False


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same memory that keeps no graph alive."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def is_plain_object(value: Value) -> bool:
    """Returns whether `value` is made of its attributes alone, so that these are its state."""
    kind: Any = type(value)
    is_of_python = kind.__new__ is object.__new__ and kind.__flags__ & _HEAP_TYPE != 0
    return (
        (is_of_python or kind is types.SimpleNamespace)
        and isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (nn.Module, type))
        # a copy that dies would give up what the object still uses
        and not hasattr(kind, "__del__")
        and not kind.__module__.startswith("rematic.")
    )


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was written in Python


def version_of(tensor: torch.Tensor) -> int:
    """Returns autograd's in-place counter, -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:  # asking first would take as long again, for every saved tensor
        return -1


def put_values_back(tensor: torch.Tensor, clone: torch.Tensor) -> None:
    """Gives a tensor the values, and the shape, that a copy of it has."""
    if tensor.shape == clone.shape:
        # .data: the version must not rise, or an earlier graph over this tensor breaks
        tensor.data.copy_(clone)
    else:  # it was resized
        tensor.data = clone.clone()

"""What the code of a step reaches beside the model and the batch: closures, globals, its object."""

from __future__ import annotations

import functools
import io
import random
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from rematic.activations.kept_values import is_plain_object
from rematic.transaction.outside_torch import GENERATORS, is_iterator
from rematic.transaction.value_state import room_of

_DEEPEST = 4
"""How many functions and objects deep values are followed."""

# Any: whatever the author of a step keeps.
Value: TypeAlias = Any


class ReachedByStep:
    """Values that code names, of the kinds whose change would make a second attempt another one.

    Args:
        step: The code: a function, a method, a partial.
    """

    def __init__(self, step: Callable[..., Any] | None) -> None:
        self.modules: list[nn.Module] = []
        """Modules, such as a loss with weights or statistics of its own."""
        self.generators: list[Value] = []
        """Generators of torch, Python and NumPy."""
        self.leaves: list[torch.Tensor] = []
        """Tensors that need a gradient and were made by nobody."""
        self.iterators: list[str] = []
        """Names of iterators, where the code names `next`."""
        self._seen: set[tuple[int, int]] = set()
        self._takes_next = False
        if step is not None:
            self._follow(step, frozenset(), depth=0)
        if not self._takes_next:
            self.iterators = []

    def _follow(self, value: Value, names: frozenset[str], *, depth: int) -> None:
        if depth > _DEEPEST or self._is_met(value):
            return
        if isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._meet("argument", item, names, depth=depth)
        elif isinstance(value, types.MethodType):
            self._follow(value.__func__, names, depth=depth)
            self._meet_object(value.__self__, _names(value.__func__), depth=depth)
        elif isinstance(value, types.FunctionType):
            self._follow_function(value, depth=depth)

    def _follow_function(self, function: types.FunctionType, *, depth: int) -> None:
        names = _names(function)
        self._takes_next |= "next" in names
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self._meet(name, cell.cell_contents, names, depth=depth + 1)
            except ValueError:  # empty
                continue
        for name in names:
            value = function.__globals__.get(name)
            near = not isinstance(value, types.FunctionType) or _is_near(value, function)
            if value is not None and near:
                self._meet(name, value, names, depth=depth + 1)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._follow(wrapped, names, depth=depth)

    def _meet_object(self, value: Value, names: frozenset[str], *, depth: int) -> None:
        """Looks at those attributes of an object that code names, and follows its own methods."""
        held = getattr(value, "__dict__", None)
        if isinstance(value, nn.Module) or not isinstance(held, dict):
            return
        for name in names:
            if name in held:
                self._meet(name, held[name], names, depth=depth + 1)
            else:
                method = getattr(type(value), name, None)
                if isinstance(method, types.FunctionType):
                    self._follow(types.MethodType(method, value), names, depth=depth + 1)

    def _meet(self, name: str, value: Value, names: frozenset[str], *, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                self.leaves.append(value)
        elif isinstance(value, (torch.Generator, *GENERATORS)):
            if not isinstance(value, random.SystemRandom):
                self.generators.append(value)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._follow(value, names, depth=depth)
        elif is_plain_object(value) and room_of(type(value)) != "torch":
            if depth <= _DEEPEST and not self._is_met(value):
                self._meet_object(value, names, depth=depth)
        elif is_iterator(value) and not isinstance(value, io.IOBase):
            self.iterators.append(name)

    def _is_met(self, value: Value) -> bool:
        """Returns whether a value was met before; a method is one by its function and object."""
        is_method = isinstance(value, types.MethodType)
        key = (id(value.__func__), id(value.__self__)) if is_method else (id(value), 0)
        is_met = key in self._seen
        self._seen.add(key)
        return is_met


def _is_near(value: types.FunctionType, function: types.FunctionType) -> bool:
    room, own = (str(f.__module__).partition(".")[0] for f in (value, function))
    return room == own


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> frozenset[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return frozenset(found)


def _names(function: Value) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else _names_in(code)


def reached_parts(roots: Iterable[nn.Module], known: set[int]) -> list[nn.Module]:
    """Returns the modules inside others that a step can change, without those that are known.

    (A teacher in evaluation mode without a gradient has nothing to put back. What is around a known
    module, such as the wrapper of several ranks, keeps its state itself.)
    """
    found = []
    managed = frozenset(known)
    for root in roots:
        wraps = any(id(part) in managed for part in root.modules())
        for part in root.modules():
            if id(part) in known:
                continue
            known.add(id(part))
            if wraps and any(id(inside) in managed for inside in part.modules()):
                continue
            trains = any(p is not None and p.requires_grad for p in part._parameters.values())
            if part.training or trains:
                found.append(part)
    return found

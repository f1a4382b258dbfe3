"""The modules inside a unit and their plain attributes, remembered from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from rematic.activations.kept_values import CONTAINERS, PLAIN, is_constant, is_plain_object
from rematic.activations.object_state import ObjectWatch
from rematic.activations.outside_state import OutsideWatch

OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
"""Attributes of `nn.Module` itself: its parameters, buffers, hooks."""

_STATE = (int, float, str, tuple, torch.Tensor, torch.Generator, *CONTAINERS)
"""Types that are kept by their value or copied, and those derived from them."""


@dataclass(slots=True)
class PlainAttributes:
    """The attributes of a module that has numbers, strings, flags and None, and no state beside.

    Kept from the last call while each is the very same object: equality would not do, as 0.0 equals
    -0.0.
    """

    names: frozenset[str]
    """Every name in the module's `__dict__`."""

    values: dict[str, Any]
    """Those that are its own and plain, and `training`."""

    others: dict[str, type]
    """Types of those that are neither plain nor state: functions, configurations."""

    objects: tuple[str, ...]
    """Names of the others that are objects made of their attributes, which may change."""

    def stand(self, present: dict[str, Any]) -> bool:
        """Returns whether a module's `__dict__` still holds these and no others."""
        values, others, at = self.values, self.others, present.__getitem__
        return (
            present.keys() == self.names
            and all(map(is_, map(at, values), values.values()))
            and all(map(is_, map(type, map(at, others)), others.values()))
        )


@dataclass(slots=True)
class Part:
    """One module of a unit."""

    prefix: str
    """Its qualified name inside the unit, with a dot where something can follow."""

    module: nn.Module | None
    """The module; None for the unit itself, which is not kept alive."""

    children: dict[str, nn.Module | None]
    """Its children when they were last looked at."""

    plain: PlainAttributes | None = None
    """Its attributes, if none is state to be copied."""


class ModuleWalk:
    """Walks a unit's modules as `named_modules` does, and remembers the way.

    It is walked anew as soon as any module has other children than before, or other objects change.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._inner: list[nn.Module] = []
        self.objects = ObjectWatch()
        """What is remembered of the objects that stand on them."""
        self.outside: OutsideWatch | None = None
        """What is read outside of them before each call, None before it is known."""

    def through(self, root: nn.Module, *, anew: bool) -> Iterator[tuple[Part, nn.Module]]:
        """Yields each module with what is remembered of it.

        Args:
            root: The unit.
            anew: Whether nothing is to be remembered of an earlier walk.
        """
        if anew or not self._stands(root):
            self._parts = [
                Part(
                    f"{path}." if path else "", None if part is root else part, dict(part._modules)
                )
                for path, part in root.named_modules()
            ]
            self._inner = [part.module for part in self._parts if part.module is not None]
        for part in self._parts:
            module = root if part.module is None else part.module
            if part.plain is None or not part.plain.stand(module.__dict__):
                part.plain = plain_attributes(module.__dict__)
            yield part, module

    def inner_modules(self) -> list[nn.Module]:
        """Returns the modules inside the unit as they were when it was last walked."""
        return self._inner

    def _stands(self, root: nn.Module) -> bool:
        for part in self._parts:
            children = (root if part.module is None else part.module)._modules
            if children != part.children:
                return False
        return bool(self._parts)


def plain_attributes(present: dict[str, Any]) -> PlainAttributes | None:
    """Reads the attributes of a module from its `__dict__`; None if some are state to be copied."""
    # (the wrapper that torch.compile makes has no flag of its own)
    values = {name: present[name] for name in ("training",) if name in present}
    others = {}
    for name in present.keys() - OF_EVERY_MODULE:
        kind = type(present[name])
        if kind in PLAIN or is_constant(present[name]):
            values[name] = present[name]
        elif issubclass(kind, _STATE):
            return None
        else:
            others[name] = kind
    objects = tuple(name for name in others if is_plain_object(present[name]))
    return PlainAttributes(frozenset(present), values, others, objects)

"""Writes to parameters in a forward that leave them as they were.

`torch.nn.utils.parametrize` sets a parameter to itself when it takes it over. Adapters on
parameters (PEFT's `ParamWrapper`, which `all-linear` puts on routers and experts) do so in every
forward, and the version of the parameter rises each time. Taken for a change, that would forbid
every replay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations import torch_private
from rematic.activations.kept_values import version_of
from rematic.memory import autocast_of_call

_SET = "aten::set_.source_Tensor"


class KnownParameter(Protocol):
    """A parameter with what its version was, harmless writes not counted."""

    tensor: torch.Tensor
    version: int


class HarmlessWrites:
    """How often the version of each tensor has risen for nothing, in all units of a model."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._counts)

    def version_of(self, tensor: torch.Tensor) -> int:
        """Returns the version of a tensor without harmless writes."""
        version = version_of(tensor)
        if not self._counts:
            return version
        ref, count = self._counts.get(id(tensor), (None, 0))
        return version - count if ref is not None and ref() is tensor else version

    def add(self, tensor: torch.Tensor, num_writes: int) -> None:
        """Takes note of so many harmless writes."""
        count = version_of(tensor) - self.version_of(tensor) + num_writes
        self._counts[id(tensor)] = weakref.ref(tensor), count


class OwnWrites:
    """What the forward of one unit writes to its parameters without changing them.

    It is learned by watching a call, after one has shown that versions rise. From then on so many
    writes are taken for harmless in its forwards and its replays.

    Args:
        of_all: Where they are counted.
    """

    def __init__(self, of_all: HarmlessWrites) -> None:
        self.of_all = of_all
        self._suspected: set[bool] = set()
        self._watched: set[bool] = set()
        self._most: dict[int, int] = {}

    def awaits(self, training: bool) -> bool:
        """Returns whether the next call in this mode must be watched."""
        return training in self._suspected and training not in self._watched

    def suspect(self, parameters: Iterable[KnownParameter], training: bool) -> bool:
        """Returns whether a forward that was not watched has written to a parameter."""
        if training in self._watched or not self.remain(parameters):
            return False
        self._suspected.add(training)
        return True

    @contextlib.contextmanager
    def watching(self, training: bool) -> Iterator[None]:
        """Learns from the forward in the body."""
        watch = _Watch()
        with watch:
            yield
        self._watched.add(training)
        for key, num_writes in watch.num_writes.items():
            self._most[key] = max(self._most.get(key, 0), num_writes)

    def settle(self, parameters: Iterable[KnownParameter]) -> None:
        """Counts what a forward or a replay has just written, if it is known to be harmless."""
        if not self._most:
            return
        for known in parameters:
            most = self._most.get(id(known.tensor), 0)
            risen = self.of_all.version_of(known.tensor) - known.version if most else 0
            if 0 < risen <= most:
                self.of_all.add(known.tensor, risen)

    def remain(self, parameters: Iterable[KnownParameter]) -> bool:
        """Returns whether a parameter was written to in a way that is not known to be harmless."""
        return any(self.of_all.version_of(p.tensor) != p.version for p in parameters)


class _Watch(TorchDispatchMode):
    """Counts the ops that set a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch 2.13
        self.num_writes: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() == _SET and _is_as_it_was(*args):
            self.num_writes[id(args[0])] += 1
        with autocast_of_call(func):
            return func(*args, **(kwargs or {}))


def _is_as_it_was(written: torch.Tensor, source: torch.Tensor) -> bool:
    """Returns whether a tensor is set to the memory that it has already."""
    return (
        torch_private.storage_key(written) == torch_private.storage_key(source)
        and written.storage_offset() == source.storage_offset()
        and written.shape == source.shape
        and written.stride() == source.stride()
    )

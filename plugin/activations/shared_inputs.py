"""Inputs that several calls of units receive, such as a position bias that all blocks share.

Such a tensor stays in memory as long as any of them holds it. Moving it would free nothing until
the last one has moved it too, and would write it out once for each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rematic.activations import torch_private
from rematic.activations.arguments import Argument
from rematic.activations.record import Record

_MANY = 8
"""Storages beyond those alive that are known before dead ones are looked for."""


@dataclass(slots=True)
class _Given:
    """A storage that was given to a call."""

    storage: weakref.ref[Any]
    version: int
    serial: int
    """Of the record of the last call that received it."""
    receivers: set[tuple[int, int]] = field(default_factory=set)
    """Positions of units, and of the tensor among their arguments."""


class SharedInputs:
    """Which inputs of a model's units are shared, as far as calls have shown."""

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}
        self._shared: dict[int, set[int]] = {}
        self._purge_at = _MANY

    def learn(self, record: Record) -> None:
        """Takes note of what a call was given, when it has ended and nothing of it has moved."""
        for position, argument in enumerate(record.arguments.tensors()):
            if argument.requires_grad:
                self._meet(argument, record.serial, (record.position, position))

    def of(self, record: Record) -> Collection[int]:
        """Returns the positions, among the tensor arguments of a record, of shared ones."""
        return self._shared.get(record.position, ())

    def _meet(self, argument: Argument, serial: int, receiver: tuple[int, int]) -> None:
        storage = torch_private.storage_of(argument.tensor())
        if storage is None:
            return
        key = torch_private.key_of_storage(storage)
        known = self._given.get(key)
        # a tensor that was changed in place since (`x += block(x)`) is another one by now
        same = known is not None and known.storage() is storage
        if known is None or not same or known.version != argument.version:
            self._purge()
            known = self._given[key] = _Given(weakref.ref(storage), argument.version, serial)
        known.receivers.add(receiver)
        if known.serial != serial:
            known.serial = serial
            for unit, position in known.receivers:
                self._shared.setdefault(unit, set()).add(position)

    def _purge(self) -> None:
        if len(self._given) >= self._purge_at:
            self._given = {k: g for k, g in self._given.items() if g.storage() is not None}
            self._purge_at = 2 * len(self._given) + _MANY

"""Units whose caller changes their input in place afterwards (`x += block(x)`).

Plain autograd allows that where the unit saves nothing of its input. A replay needs the input as it
was, so records of such units that start evicted hold copies. A unit is found out by its first
record, which is let go only when a unit is called with another input, or backward begins. (Units
side by side have one input: `x += attention(x) + mlp(x)`.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.record import Record
from rematic.activations.torch_private import storage_key

INPUT_IS_REUSED = (
    "its input is changed in place after its call (`x += block(x)`): this call stays in memory, "
    "later ones that do not hold a copy of their input"
)
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class ReusedInputs:
    """Which tensor arguments of one unit are changed after its calls, by their position."""

    def __init__(self) -> None:
        self._positions: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._positions)

    def learn(self, record: Record) -> bool:
        """Takes note of the inputs of a record that have changed; returns whether any has."""
        positions = record.arguments.mutated_positions()
        self._positions.update(positions)
        return bool(positions)

    def copied(self, call: Call) -> Call:
        """Returns the arguments of a call with copies of those that will change."""
        copies: dict[int, torch.Tensor] = {}
        for position, tensor in enumerate(iter_leaves(call)):
            if position in self._positions and id(tensor) not in copies:
                copy = tensor.detach().clone()
                copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return map_leaves(lambda tensor: copies.get(id(tensor), tensor), call)


class WaitingRecords:
    """Records that were not let go yet, since their caller may change their inputs."""

    def __init__(self) -> None:
        self._waiting: list[tuple[weakref.ref[Record], Callable[[Record], None]]] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def add(self, record: Record, settle: Callable[[Record], None]) -> None:
        """Lets `settle` be called with the record when something is known, if it is still there."""
        self._waiting.append((weakref.ref(record), settle))

    def settle(self, before: Call | None = None) -> None:
        """Calls what waits.

        Args:
            before: The call that comes next, if it is one: records whose input it is given too wait
                on, as that may be changed after it.
        """
        if not self._waiting:
            return
        given = set[int | None]() if before is None else set(map(storage_key, iter_leaves(before)))
        waiting, self._waiting = self._waiting, []
        for ref, settle in waiting:
            record = ref()
            if record is None:
                continue
            if _waits_on(record, given):
                self._waiting.append((ref, settle))
            else:
                settle(record)


def _waits_on(record: Record, given: set[int | None]) -> bool:
    inputs = record.arguments.aliases()[:1]  # what comes after it (masks) many units are given
    is_given = bool(inputs) and storage_key(inputs[0]) in given
    return is_given and not record.arguments.mutated_positions()

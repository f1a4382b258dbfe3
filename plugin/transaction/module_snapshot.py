"""What modules hold before a step, so that a failed attempt at it leaves nothing behind.

Taken for every step that can be repeated, so it costs a few microseconds per module: attributes by
reference, containers and small tensors as copies. Large buffers and objects of classes of their
author's own are copied only where a finished step has shown that they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from rematic.activations.kept_values import (
    CLONED_BUFFER_BYTES,
    copied,
    is_plain_object,
    put_values_back,
    version_of,
)
from rematic.activations.module_walk import OF_EVERY_MODULE
from rematic.activations.object_state import ObjectState
from rematic.transaction.gradients import RestoreError
from rematic.transaction.outside_torch import KINDS, StateOutsideTorch, is_iterator
from rematic.transaction.value_state import (
    CONTAINERS,
    Held,
    ValueState,
    has_graph,
    room_of,
)

_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device})
_HOLDERS = frozenset({"types", "collections", "argparse"})
"""Where Python has classes whose objects only hold what their user puts there."""
_DICTIONARIES = ("_parameters", "_buffers", "_modules")
_STATISTICS = frozenset({"running_mean", "running_var"})
"""Buffers that kernels change without raising their in-place counter."""


@dataclass(kw_only=True)
class ChangingState:
    """What the steps of a model were seen to change, beyond what is always copied."""

    is_known: bool = False
    """Whether a step has finished and shown it."""
    names: set[str] = field(default_factory=set)
    """Objects and large buffers: position of the module in the walk and name."""
    tensors: dict[int, Held] = field(default_factory=dict)
    """Copies of what containers and objects held before the last step."""


@dataclass(slots=True)
class _TensorState:
    """A buffer or tensor attribute: its copy, or its in-place counter alone."""

    tensor: torch.Tensor
    name: str
    version: int
    clone: torch.Tensor | None

    def is_changed(self) -> bool:
        return self.clone is None and version_of(self.tensor) != self.version


@dataclass(frozen=True, kw_only=True)
class TensorCopies:
    """Buffers and other tensors of modules, with what they held at one moment."""

    buffers: Sequence[tuple[dict[str, Any], dict[str, Any]]] = ()
    """Dictionaries of buffers, and which tensors they held."""
    values: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Tensors, and copies of them."""

    def now(self) -> TensorCopies:
        """Returns what the same places hold now."""
        return TensorCopies(
            buffers=[(held, held.copy()) for held, _ in self.buffers],
            values=[(tensor, tensor.detach().clone()) for tensor, _ in self.values],
        )

    def put(self) -> None:
        """Makes them hold it again."""
        for present, before in self.buffers:
            _replace_if_changed(present, before)
        for tensor, copy in self.values:
            put_values_back(tensor, copy)


class ModuleSnapshot:
    """The state of modules at one moment.

    Args:
        modules: The modules, each by itself: children are not looked for.
        changing: What steps of these modules change; learned from and added to by `learn`.
        skipped: Names of attributes that belong to somebody else.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        changing: ChangingState,
        *,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self._changing = changing
        self._skipped = skipped | {"forward"}  # hosts exchange it around a call
        self._passed_over = OF_EVERY_MODULE | self._skipped
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._dictionaries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._empty: list[dict[str, Any]] = []
        self._tensors: list[_TensorState] = []
        self._objects: list[ObjectState] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._outside: list[StateOutsideTorch] = []
        self._left_out: set[tuple[int, str]] = set()
        modules, seen = list(modules), set[int]()
        rooms = _HOLDERS | {room_of(type(module)) for module in modules}
        self.values = ValueState(
            lambda kind: room_of(kind) in rooms,  # a snapshot must not hold itself
            may_change=lambda name: not changing.is_known or name in changing.names,
            known=changing.tensors,
        )
        """What lies in containers and in objects of the modules' authors."""
        for i, module in enumerate(modules):
            self._read(module, i, seen)
        changing.tensors = self.values.tensors

    def _read(self, module: nn.Module, position: int, seen: set[int]) -> None:
        values = module.__dict__
        self._attributes.append((values, values.copy()))
        for key in _DICTIONARIES:
            held = values[key]
            if held:
                self._dictionaries.append((held, held.copy()))
            else:
                self._empty.append(held)
        if values["_buffers"]:
            self._buffers.append((values["_buffers"], values["_buffers"].copy()))
            for name, buffer in values["_buffers"].items():
                if buffer is not None:
                    self._read_tensor(buffer, name, position)
        passed_over = self._passed_over
        for name, value in values.items():
            if name in passed_over:  # first: it is what most of them are
                continue
            kind = type(value)
            if kind in _PLAIN:
                continue
            if issubclass(kind, (*CONTAINERS, tuple)) or self.values.enters(value):
                self.values.read(value, f"{position} {name}")
            elif isinstance(value, torch.Tensor):
                self._read_tensor(value, name, position)
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif isinstance(value, KINDS):
                self._read_outside(value, name, position)
            elif is_iterator(value) and not is_plain_object(value):
                self._outside.append(StateOutsideTorch.of_iterator(values, name))
            elif self._may_change(name, position) and id(value) not in seen:
                seen.add(id(value))
                if is_plain_object(value):
                    key = f"{position} {name}"
                    self._objects.append(ObjectState.read(values, name, key))

    def _read_outside(self, value: Any, name: str, position: int) -> None:  # noqa: ANN401
        if not isinstance(value, np.ndarray):
            self._outside.append(StateOutsideTorch.of_generator(value))
        elif value.nbytes <= CLONED_BUFFER_BYTES or self._may_change(name, position):
            key = f"{position} {name}"
            self._outside.append(StateOutsideTorch.of_array(value, key))

    def _read_tensor(self, tensor: torch.Tensor, name: str, position: int) -> None:
        if tensor.requires_grad:
            if tensor.is_leaf:
                self.values.leaves.append(tensor)
            return  # computed: a new one stands there after a step, and the old one is put back
        small = tensor.numel() * tensor.element_size() <= CLONED_BUFFER_BYTES
        key = f"{position} {name}"
        cloned = small or name in _STATISTICS or key in self._changing.names
        clone = tensor.detach().clone() if cloned else None
        self._tensors.append(_TensorState(tensor, key, version_of(tensor), clone))

    def _may_change(self, name: str, position: int) -> bool:
        return not self._changing.is_known or f"{position} {name}" in self._changing.names

    def leave_graphs(self) -> None:
        """Leaves out what a graph hangs on: it is as somebody else puts it, not as it was."""
        for part, (present, before) in enumerate(self._attributes):
            kept = {name: value for name, value in before.items() if not has_graph(value)}
            self._attributes[part] = (present, kept)
            self._left_out |= {(part, name) for name in before.keys() - kept.keys()}
        self.values.leave_graphs()

    def tensor_copies(self) -> TensorCopies:
        """Returns buffers and tensors of which there are copies, and nothing else of the step."""
        copies = [(s.tensor, s.clone) for s in self._tensors if s.clone is not None]
        return TensorCopies(buffers=self._buffers, values=copies)

    def learn(self) -> None:
        """Takes note of what a finished step has changed."""
        self._changing.names |= {s.name for s in self._tensors if s.is_changed()}
        self._changing.names |= self.values.changed_names()
        if not self._changing.is_known:
            self._changing.names |= {o.full_name for o in self._objects if o.changed()}
            self._changing.names |= {s.name for s in self._outside if s.is_changed()}
            self._changing.is_known = True

    def check(self) -> None:
        """Refuses what cannot be put back.

        Raises:
            RestoreError: If a large tensor was changed of which there is no copy.
        """
        for state in (*self._outside, *self.values.outside):
            state.check()
        held = self.values.obstacle()
        if held is not None:
            self.learn()
            raise RestoreError(
                f"{held}, of which no copy was taken since no step had changed it before, was "
                "changed in place."
            )
        changed = [s.name.split(" ")[1] for s in self._tensors if s.is_changed()]
        if changed:
            # the next step has a copy of it
            self.learn()
            raise RestoreError(
                f"buffer {changed[0]!r}, of which no copy was taken since no step had changed it "
                "before, was changed in place."
            )

    def restore(self) -> None:
        """Makes the modules hold what they held; values are put back, not copies of them."""
        for part, (present, before) in enumerate(self._attributes):
            left_out = {name for position, name in self._left_out if position == part}
            _restore_attributes(present, before, self._skipped | left_out)
        for present, before in self._dictionaries:
            _replace_if_changed(present, before)
        for empty in self._empty:
            empty.clear()
        self.values.restore()
        for held in self._objects:
            if held.changed():
                held.restore()
        for state in self._tensors:
            if state.clone is not None:
                put_values_back(state.tensor, state.clone)
        for outside in self._outside:
            outside.restore()
        for generator, generator_state in self._generators:
            generator.set_state(generator_state)


def _restore_attributes(
    present: dict[str, Any], before: dict[str, Any], skipped: frozenset[str]
) -> None:
    for name in [n for n in present if n not in before and n not in skipped]:
        del present[name]
    for name, value in before.items():
        if name not in skipped and present.get(name, present) is not value:
            present[name] = value


def _replace_if_changed(present: dict[str, Any], before: dict[str, Any]) -> None:
    same = list(present) == list(before) and all(present[k] is v for k, v in before.items())
    if not same:
        present.clear()
        present.update(before)


def refill(container: Any, contents: Any) -> None:  # noqa: ANN401 - a type of CONTAINERS
    """Makes a container hold what a copy of it holds."""
    fresh = copied(contents)
    container.clear()
    if hasattr(container, "extend"):
        container.extend(fresh)
    else:
        container.update(fresh)

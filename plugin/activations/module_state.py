"""What a unit's forward can read and change on its own modules: attributes, buffers, generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rematic.activations.container_state import ContainerState
from rematic.activations.harmless_writes import HarmlessWrites, OwnWrites
from rematic.activations.host_generators import HOST_GENERATORS, HostGenerator
from rematic.activations.kept_values import (
    CLONED_BUFFER_BYTES,
    CONTAINERS,
    PLAIN,
    copied,
    is_constant,
    is_plain_object,
    put_values_back,
    version_of,
    without_graph,
)
from rematic.activations.module_walk import OF_EVERY_MODULE, ModuleWalk
from rematic.activations.object_state import Place
from rematic.activations.standing_names import StandingNames


@dataclass(slots=True)
class TensorState:
    """One buffer, or one tensor that is a plain attribute, as forward saw it."""

    home: dict[str, Any]
    name: str
    full_name: str
    tensor: torch.Tensor | None
    version: int
    clone: torch.Tensor | None


@dataclass(slots=True)
class ParameterState:
    """One parameter as forward saw it, or what stood in its place (`functional_call`)."""

    home: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    """Harmless writes not counted."""
    requires_grad: bool


@dataclass(slots=True)
class ComputedState:
    """One attribute that is a tensor with a graph, as forward saw it (the state of a recurrence).

    With its graph only until its forward has ended, so that no step keeps the one before alive.
    """

    home: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int | None
    """None for a view: sharded parameters are, and their gathering counts as a change."""


class ModuleState:
    """What a unit's modules held before its forward: flags, attributes, buffers, versions."""

    __slots__ = (
        "_host_states",
        "_standing",
        "attributes",
        "children",
        "computed",
        "containers",
        "generators",
        "objects",
        "outside",
        "parameters",
        "tensor_states",
        "writes",
    )

    def __init__(
        self,
        module: nn.Module,
        mutable: frozenset[str] | None,
        walk: ModuleWalk | None = None,
        writes: OwnWrites | None = None,
    ) -> None:
        """Reads the state.

        Args:
            module: The unit.
            mutable: Names of the tensors and objects that forward changes; None: all of them may.
            walk: What was remembered of its modules in the call before.
            writes: What its forward is known to write to parameters without changing them.
        """
        self.writes = OwnWrites(HarmlessWrites()) if writes is None else writes
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.children: list[tuple[dict[str, nn.Module | None], dict[str, nn.Module | None]]] = []
        self.computed: list[ComputedState] = []
        places: list[Place] = []
        self.tensor_states: list[TensorState] = []
        self.containers: list[ContainerState] = []
        self.generators: list[torch.Generator | HostGenerator] = [
            generator
            for generator in HOST_GENERATORS
            if mutable is None or generator.name in mutable
        ]
        self._host_states = [(g, g.get_state()) for g in HOST_GENERATORS if mutable is None]
        self.parameters: list[ParameterState] = []
        self._standing = StandingNames()
        walk = walk or ModuleWalk()
        for known, part in walk.through(module, anew=mutable is None):
            prefix = known.prefix
            if known.plain is not None:
                self.attributes.append((part, known.plain.values))
                for name in known.plain.objects:
                    places.append((part.__dict__, name, prefix + name))
            else:
                places += self._read_attributes(part, prefix, mutable)
            self._standing.add(part, known)
            if known.children:
                self.children.append((part._modules, known.children))
            for name, buffer in part._buffers.items():
                self.tensor_states.append(
                    _tensor_state(part._buffers, name, prefix + name, buffer, mutable)
                )
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self.parameters.append(_parameter_state(part._parameters, name, parameter))
        if self.writes.of_all:
            for parameter_state in self.parameters:
                written = parameter_state.tensor
                parameter_state.version = self.writes.of_all.version_of(written)
        self.objects = walk.objects.read(places, is_first=mutable is None) if places else []
        self.outside = walk.outside.read() if walk.outside else None

    def _read_attributes(
        self, part: nn.Module, prefix: str, mutable: frozenset[str] | None
    ) -> list[Place]:
        """Reads the attributes of one module; returns where its objects stand."""
        places = []
        values = part.__dict__
        plain: dict[str, Any] = {"training": part.training}
        for name in values.keys() - OF_EVERY_MODULE:
            value = values[name]
            kind = type(value)
            if kind in PLAIN or is_constant(value):
                plain[name] = value
            elif kind in CONTAINERS or isinstance(value, tuple):
                self.containers.append(
                    ContainerState.read(
                        values,
                        name,
                        prefix + name,
                        clones=mutable is None or prefix + name in mutable,
                    )
                )
            elif isinstance(value, (int, float, str)):  # enumerations, numbers of other libraries
                plain[name] = value
            elif isinstance(value, torch.Generator):
                self.generators.append(value)
            elif isinstance(value, torch.Tensor):
                self._read_tensor(values, name, prefix, mutable)
            elif is_plain_object(value):
                places.append((values, name, prefix + name))
        self.attributes.append((part, plain))
        return places

    def _read_tensor(
        self, values: dict[str, Any], name: str, prefix: str, mutable: frozenset[str] | None
    ) -> None:
        tensor: torch.Tensor = values[name]
        if tensor.requires_grad:
            version = None if tensor._is_view() else version_of(tensor)
            self.computed.append(ComputedState(values, name, tensor, version))
        else:
            self.tensor_states.append(_tensor_state(values, name, prefix + name, tensor, mutable))

    def tensors(self) -> list[torch.Tensor]:
        """Returns parameters, buffers and tensor attributes: external to what the unit computes."""
        found = [state.tensor for state in self.parameters]
        found += [state.tensor for state in self.computed]
        return found + [s.tensor for s in self.tensor_states if s.tensor is not None]

    def leave_graphs(self) -> None:
        """Lets go of what could keep a graph alive, when forward has ended and will not run again.

        (An attribute may hold an output of the call before, and so all calls before.)
        """
        for computed in self.computed:
            computed.tensor = without_graph(computed.tensor)
        for kept in self.containers:
            kept.contents = copied(kept.contents, leaf=without_graph)
        for held in self.objects:
            held.note_change()
            held.leave_graph()

    def changed_outside(self) -> bool:
        """Returns whether something outside of the modules is not as it was before the call."""
        return self.outside is not None and self.outside.change() is not None

    def inner_modules(self) -> list[nn.Module]:
        """Returns the modules inside the unit; the hooks of the unit itself never see a replay."""
        return [part for part, _ in self.attributes[1:]]

    def changed_names(self) -> frozenset[str]:
        """Returns the full names of what forward changed: cloned tensors, objects, generators."""
        names = {held.full_name for held in self.objects if held.changed()}
        names |= {g.name for g, state in self._host_states if state != g.get_state()}
        names |= {kept.full_name for kept in self.containers if kept.changed()}
        return frozenset(names) | frozenset(
            state.full_name
            for state in self.tensor_states
            if state.clone is not None
            and state.tensor is not None
            and not torch.equal(state.clone, state.tensor)
        )

    def changed_tensor(self) -> str | None:
        """Describes a parameter or uncloned buffer changed in place since forward, if any."""
        present_version = self.writes.of_all.version_of if self.writes.of_all else version_of
        for parameter in self.parameters:
            if present_version(parameter.tensor) != parameter.version:
                return f"parameter of shape {tuple(parameter.tensor.shape)}"
        for state in self.tensor_states:
            tensor = state.tensor
            if state.clone is None and tensor is not None and version_of(tensor) != state.version:
                return f"buffer {state.full_name!r}"
        for computed in self.computed:
            if computed.version not in (None, version_of(computed.tensor)):
                return f"attribute {computed.name!r}"
        for kept in self.containers:
            if any(clone is None and version_of(t) != v for t, v, clone in kept.tensors.values()):
                return f"tensor {kept.full_name!r}"
        for held in self.objects:
            name = held.changed_tensor()
            if name is not None:
                return f"tensor {name!r}"
        name = None if self.outside is None else self.outside.changed_tensor()
        return None if name is None else f"tensor {name!r}"

    def restore(self) -> None:
        """Puts values, not copies of them, back after a failed forward that will run again."""
        self._standing.remove_new()
        if self.outside is not None:
            self.outside.restore()
        for module, values in self.attributes:
            restore_plain(module, values)
        for kept in self.containers:
            kept.restore()
        for computed in self.computed:
            computed.home[computed.name] = computed.tensor
        for held in self.objects:
            held.restore()
        for state in self.tensor_states:
            state.home[state.name] = state.tensor
            if state.tensor is not None and state.clone is not None:
                put_values_back(state.tensor, state.clone)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Shows the modules as forward saw them; whatever the body changes is undone."""
        before = [(part, dict(part.__dict__), dict(part._buffers)) for part, _ in self.attributes]
        replaced = [(p, p.home.get(p.name)) for p in self.parameters]
        replaced = [(p, present) for p, present in replaced if present is not p.tensor]
        exchanged = [(home, dict(home)) for home, then in self.children if home != then]
        frozen = [p for p in self.parameters if p.tensor.requires_grad is not p.requires_grad]
        guarded: list[tuple[dict[str, Any], dict[str, Any]]] = []
        show_new: Callable[[], None] | None = None
        try:
            for parameter, _ in replaced:
                parameter.home[parameter.name] = parameter.tensor
            for parameter in frozen:
                parameter.tensor.requires_grad_(parameter.requires_grad)
            for home, then in self.children:
                if home != then:
                    _replace(home, then)
            show_new = self._standing.hide_new()
            guarded = self._show_attributes()
            for state in self.tensor_states:
                shown = state.tensor if state.clone is None else state.clone.clone()
                state.home[state.name] = shown
            with contextlib.nullcontext() if self.outside is None else self.outside.shown():
                yield
        finally:
            for parameter in frozen:
                parameter.tensor.requires_grad_(not parameter.requires_grad)
            for parameter, there in replaced:
                parameter.home[parameter.name] = there
            if show_new is not None:
                show_new()
            for home, now in exchanged:
                _replace(home, now)
            for part, present, buffers in before:
                _replace(part._buffers, buffers)
                _restore_all(part.__dict__, present)
            for there, held_before in guarded:
                _restore_all(there, held_before)

    def _show_attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns objects whose attributes must be put back: now, and as a copy."""
        for part, values in self.attributes:
            restore_plain(part, values)
        for kept in self.containers:
            kept.home[kept.name] = kept.shown()
        for computed in self.computed:
            computed.home[computed.name] = without_graph(computed.tensor)
        shown = [held.show() for held in self.objects]
        return [guarded for guarded in shown if guarded is not None]


def restore_plain(module: nn.Module, values: dict[str, Any]) -> None:
    """Gives plain attributes (numbers, strings, flags, None) the values they had."""
    present = module.__dict__
    for key, value in values.items():
        if present.get(key, values) is not value:
            present[key] = value


def _restore_all(present: dict[str, Any], values: dict[str, Any]) -> None:
    for key in [key for key in present if key not in values]:
        del present[key]
    for key, value in values.items():
        if present.get(key, present) is not value:
            present[key] = value


def _replace(present: dict[str, Any], wanted: dict[str, Any]) -> None:
    present.clear()
    present.update(wanted)


def _parameter_state(home: dict[str, Any], name: str, tensor: torch.Tensor) -> ParameterState:
    return ParameterState(home, name, tensor, version_of(tensor), tensor.requires_grad)


def _tensor_state(
    home: dict[str, Any],
    name: str,
    full_name: str,
    tensor: torch.Tensor | None,
    mutable: frozenset[str] | None,
) -> TensorState:
    if tensor is None:
        return TensorState(home, name, full_name, None, -1, None)
    small = tensor.numel() * tensor.element_size() <= CLONED_BUFFER_BYTES
    cloned = small or mutable is None or full_name in mutable
    clone = tensor.detach().clone() if cloned else None
    return TensorState(home, name, full_name, tensor, version_of(tensor), clone)

"""What a unit's forward can read and change on its own modules: attributes, buffers, generators."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset(
    {list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict}
    | {collections.Counter}
)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
"""Attributes of `nn.Module` itself: its parameters, buffers, hooks."""
CLONED_BUFFER_BYTES = 1 << 16
"""Buffers up to this size are cloned before every forward; larger ones once they were seen to
change. (BatchNorm changes its statistics without raising `_version`, so versions alone miss it.)"""


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
    requires_grad: bool


@dataclass(slots=True)
class ContainerState:
    """One attribute that is a list, dictionary or the like, as forward saw it.

    A copy alone: the container may come to hold an output of the unit, and with it its graph.
    """

    home: dict[str, Any]
    name: str
    contents: Any


class ModuleState:
    """What a unit's modules held before its forward: flags, attributes, buffers, versions."""

    __slots__ = ("attributes", "containers", "generators", "parameters", "tensor_states")

    def __init__(self, module: nn.Module, mutable: frozenset[str] | None) -> None:
        """Reads the state; `mutable` None means that every tensor may change."""
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.tensor_states: list[TensorState] = []
        self.containers: list[ContainerState] = []
        self.generators: list[torch.Generator] = []
        self.parameters: list[ParameterState] = []
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            self._read_attributes(part, prefix, mutable)
            for name, buffer in part._buffers.items():
                self.tensor_states.append(
                    _tensor_state(part._buffers, name, prefix + name, buffer, mutable)
                )
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self.parameters.append(_parameter_state(part._parameters, name, parameter))

    def _read_attributes(
        self, part: nn.Module, prefix: str, mutable: frozenset[str] | None
    ) -> None:
        values = part.__dict__
        plain: dict[str, Any] = {"training": part.training}
        for name in values.keys() - _OF_EVERY_MODULE:
            value = values[name]
            kind = type(value)
            if kind in _PLAIN:
                plain[name] = value
            elif kind in _CONTAINERS:
                self.containers.append(ContainerState(values, name, copy.copy(value)))
            elif isinstance(value, (int, float, str)):  # enumerations, numbers of other libraries
                plain[name] = value
            elif isinstance(value, torch.Generator):
                self.generators.append(value)
            elif isinstance(value, torch.Tensor) and not value.requires_grad:
                # (with a gradient it was computed from parameters: a replay computes it again)
                self.tensor_states.append(
                    _tensor_state(values, name, prefix + name, value, mutable)
                )
        self.attributes.append((part, plain))

    def tensors(self) -> list[torch.Tensor]:
        """Returns parameters, buffers and tensor attributes: external to what the unit computes."""
        parameters = [state.tensor for state in self.parameters]
        return parameters + [s.tensor for s in self.tensor_states if s.tensor is not None]

    def mutated_tensors(self) -> frozenset[str]:
        """Returns the full names of the cloned tensors that forward changed."""
        return frozenset(
            state.full_name
            for state in self.tensor_states
            if state.clone is not None
            and state.tensor is not None
            and not torch.equal(state.clone, state.tensor)
        )

    def changed_tensor(self) -> str | None:
        """Describes a parameter or uncloned buffer changed in place since forward, if any."""
        for parameter in self.parameters:
            if version_of(parameter.tensor) != parameter.version:
                return f"parameter of shape {tuple(parameter.tensor.shape)}"
        for state in self.tensor_states:
            tensor = state.tensor
            if state.clone is None and tensor is not None and version_of(tensor) != state.version:
                return f"buffer {state.full_name!r}"
        return None

    def restore(self) -> None:
        """Puts values, not copies of them, back after a failed forward that will run again."""
        for module, values in self.attributes:
            restore_plain(module, values)
        for kept in self.containers:
            _refill(kept)
        for state in self.tensor_states:
            state.home[state.name] = state.tensor
            if state.tensor is not None and state.clone is not None:
                # .data: the version must not rise, or an earlier graph over this buffer breaks
                state.tensor.data.copy_(state.clone)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Shows the modules as forward saw them; whatever the body changes is undone."""
        before = [(part, dict(part.__dict__), dict(part._buffers)) for part, _ in self.attributes]
        replaced = [(p, p.home.get(p.name)) for p in self.parameters]
        replaced = [(p, present) for p, present in replaced if present is not p.tensor]
        frozen = [p for p in self.parameters if p.tensor.requires_grad is not p.requires_grad]
        try:
            for parameter, _ in replaced:
                parameter.home[parameter.name] = parameter.tensor
            for parameter in frozen:
                parameter.tensor.requires_grad_(parameter.requires_grad)
            for part, values in self.attributes:
                restore_plain(part, values)
            for kept in self.containers:
                kept.home[kept.name] = copy.copy(kept.contents)
            for state in self.tensor_states:
                shown = state.tensor if state.clone is None else state.clone.clone()
                state.home[state.name] = shown
            yield
        finally:
            for parameter in frozen:
                parameter.tensor.requires_grad_(not parameter.requires_grad)
            for parameter, there in replaced:
                parameter.home[parameter.name] = there
            for part, present, buffers in before:
                part._buffers.clear()
                part._buffers.update(buffers)
                _restore_all(part, present)


def version_of(tensor: torch.Tensor) -> int:
    """Returns autograd's in-place counter, -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def restore_plain(module: nn.Module, values: dict[str, Any]) -> None:
    """Gives plain attributes (numbers, strings, flags, None) the values they had."""
    present = module.__dict__
    for key, value in values.items():
        if present.get(key, values) is not value:
            present[key] = value


def _restore_all(module: nn.Module, values: dict[str, Any]) -> None:
    present = module.__dict__
    for key in [key for key in present if key not in values]:
        del present[key]
    for key, value in values.items():
        if present.get(key, present) is not value:
            present[key] = value


def _refill(kept: ContainerState) -> None:
    # Any: one of the types of _CONTAINERS, the same as that of the copy
    container: Any = kept.home.get(kept.name)
    if type(container) is not type(kept.contents):
        kept.home[kept.name] = copy.copy(kept.contents)
        return
    container.clear()
    if isinstance(container, (list, collections.deque)):
        container.extend(kept.contents)
    else:
        container.update(kept.contents)


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

"""What a unit's forward can read and change on its own modules: flags, attributes, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))
CLONED_BUFFER_BYTES = 1 << 16
"""Buffers up to this size are cloned before every forward; larger ones once they were seen to
change. (BatchNorm changes its statistics without raising `_version`, so versions alone miss it.)"""


@dataclass(slots=True)
class BufferState:
    """One buffer as forward saw it."""

    module: nn.Module
    name: str
    full_name: str
    tensor: torch.Tensor | None
    version: int
    clone: torch.Tensor | None


class ModuleState:
    """Flags, plain attributes, buffers and parameter versions of a unit before its forward."""

    __slots__ = ("attributes", "buffers", "parameters")

    def __init__(self, module: nn.Module, mutable_buffers: frozenset[str] | None) -> None:
        """Reads the state; `mutable_buffers` None means that every buffer may change."""
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.buffers: list[BufferState] = []
        self.parameters: list[tuple[nn.Parameter, int]] = []
        for path, part in module.named_modules():
            values = part.__dict__
            self.attributes.append(
                (part, {key: v for key, v in values.items() if isinstance(v, _PLAIN)})
            )
            for name, buffer in part._buffers.items():
                full = f"{path}.{name}" if path else name
                mutable = mutable_buffers is None or full in mutable_buffers
                self.buffers.append(_buffer_state(part, name, full, buffer, mutable))
            for parameter in part._parameters.values():
                if parameter is not None:
                    self.parameters.append((parameter, version_of(parameter)))

    def tensors(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers: external to whatever the unit computes."""
        parameters: list[torch.Tensor] = [parameter for parameter, _ in self.parameters]
        return parameters + [s.tensor for s in self.buffers if s.tensor is not None]

    def mutated_buffers(self) -> frozenset[str]:
        """Returns the full names of the cloned buffers that forward changed."""
        return frozenset(
            state.full_name
            for state in self.buffers
            if state.clone is not None
            and state.tensor is not None
            and not torch.equal(state.clone, state.tensor)
        )

    def changed_tensor(self) -> str | None:
        """Describes a parameter or uncloned buffer changed in place since forward, if any."""
        for parameter, version in self.parameters:
            if version_of(parameter) != version:
                return f"parameter of shape {tuple(parameter.shape)}"
        for state in self.buffers:
            tensor = state.tensor
            if state.clone is None and tensor is not None and version_of(tensor) != state.version:
                return f"buffer {state.name!r}"
        return None

    def restore(self) -> None:
        """Puts values, not copies of them, back after a failed forward that will run again."""
        for module, values in self.attributes:
            restore_plain(module, values)
        for state in self.buffers:
            state.module._buffers[state.name] = state.tensor
            if state.tensor is not None and state.clone is not None:
                # .data: the version must not rise, or an earlier graph over this buffer breaks
                state.tensor.data.copy_(state.clone)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Shows the modules as forward saw them; whatever the body changes is undone."""
        before = [(part, dict(part.__dict__)) for part, _ in self.attributes]
        buffers = [(s.module, dict(s.module._buffers)) for s in self.buffers]
        try:
            for part, values in self.attributes:
                restore_plain(part, values)
            for state in self.buffers:
                shown = state.tensor if state.clone is None else state.clone.clone()
                state.module._buffers[state.name] = shown
            yield
        finally:
            for module, present in buffers:
                module._buffers.clear()
                module._buffers.update(present)
            for part, present_attributes in before:
                _restore_all(part, present_attributes)


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


def _buffer_state(
    module: nn.Module, name: str, full_name: str, buffer: torch.Tensor | None, mutable: bool
) -> BufferState:
    if buffer is None:
        return BufferState(module, name, full_name, None, -1, None)
    small = buffer.numel() * buffer.element_size() <= CLONED_BUFFER_BYTES
    clone = buffer.detach().clone() if mutable or small else None
    return BufferState(module, name, full_name, buffer, version_of(buffer), clone)

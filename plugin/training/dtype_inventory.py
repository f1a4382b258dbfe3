"""Counts what a model holds by role and type, and finds what should not be in 32 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rematic.byte_sizes import format_bytes
from rematic.training.quantize import PACKED

_ADAPTER_PARTS = ("lora_", "modules_to_save")


@dataclass(frozen=True, kw_only=True)
class Held:
    """The tensors of one role and type."""

    role: str
    """`head`, `embedding`, `norm`, `adapter`, `linear`, `packed` or `other`."""
    dtype: str
    """Type as torch names it, without `torch.`."""
    is_trained: bool
    """Whether they get gradients."""
    num_tensors: int
    """How many they are."""
    num_bytes: int
    """Their bytes, without the scales of packed ones."""

    def __str__(self) -> str:
        trained = "trained" if self.is_trained else "frozen"
        size = format_bytes(self.num_bytes)
        return f"{self.role} {self.dtype} {trained}: {self.num_tensors} tensors, {size}"


def take_inventory(model: nn.Module) -> tuple[Held, ...]:
    """What the parameters of a model are, by role and type; shared ones count once."""
    roles = _roles(model)
    tensors: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for name, parameter in model.named_parameters():
        key = (roles[name], str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
        tensors[key] += 1
        sizes[key] += parameter.nbytes
    return tuple(
        Held(
            role=role,
            dtype=dtype,
            is_trained=is_trained,
            num_tensors=tensors[role, dtype, is_trained],
            num_bytes=sizes[role, dtype, is_trained],
        )
        for role, dtype, is_trained in sorted(tensors)
    )


def check_dtypes(model: nn.Module, *, dtype: torch.dtype, is_quantized: bool) -> None:
    """Refuses frozen weights of another type than the recipe says.

    Preparing a model for training in few bits by the usual call turns norms and head into 32 bits,
    for which long sequences pay in logits. Nothing here does that; this makes sure.

    Args:
        model: A model as it is trained.
        dtype: Type of the weights that are not quantized.
        is_quantized: Whether there must be packed weights.

    Raises:
        RuntimeError: A frozen weight is of another type, or nothing is packed.
    """
    roles = _roles(model)
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    wrong = [
        f"{name} ({roles[name]}) is {parameter.dtype}"
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and roles[name] != "packed"
        and parameter.dtype != dtype
        and not any(part in name for part in kept)
    ]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} frozen weights are not {dtype} as model.dtype says, such as "
            f"{', '.join(wrong[:3])}: something has converted them since they were loaded. "
            "Expected head and norms in the type of the others; report it with the recipe"
        )
    if is_quantized and "packed" not in roles.values():
        raise RuntimeError(
            "no weight of the model is quantized although the recipe asks for it: expected linear "
            "layers that are not the head; write quantization.format: none"
        )


def _roles(model: nn.Module) -> Mapping[str, str]:
    head = _head(model)
    roles: dict[str, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            roles[full] = _role(full, module, parameter, head)
    return roles


def _role(name: str, module: nn.Module, parameter: nn.Parameter, head: nn.Module | None) -> str:
    if type(parameter).__name__ in PACKED or "parametrizations" in name:
        return "packed"
    if any(part in name for part in _ADAPTER_PARTS):
        return "adapter"
    if module is head:
        return "head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "norm" in type(module).__name__.lower():
        return "norm"
    return "linear" if isinstance(module, nn.Linear) else "other"


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    base = getattr(found, "base_layer", found)  # inside an adapter of the head
    return base if isinstance(base, nn.Module) else None

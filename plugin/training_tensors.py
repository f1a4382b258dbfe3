"""The tensors of a training: parameters, buffers, gradients, optimizer state; and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the gradients that exist."""
    return sum(tensor_bytes(p.grad) for p in parameters if p.grad is not None)


def pending_gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the gradients that backward has yet to allocate."""
    return sum(tensor_bytes(p) for p in parameters if p.requires_grad and p.grad is None)


def existing_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Returns the bytes of every tensor of the training that exists now."""
    return sum(tensor_bytes(tensor) for tensor in _existing(model, optimizers))


def resident_bytes(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that stay between steps, by kind."""
    states = [state.values() for optimizer in optimizers for state in optimizer.state.values()]
    kinds: dict[str, Iterable[torch.Tensor]] = {
        "weights": model.parameters(),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "buffers": model.buffers(),
        "optimizer": [v for values in states for v in values if isinstance(v, torch.Tensor)],
    }
    return tuple((kind, sum(map(tensor_bytes, tensors))) for kind, tensors in kinds.items())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the elements of a tensor; of a sharded one, those of this rank."""
    local_part = getattr(tensor, "to_local", None)  # of a DTensor
    if local_part is not None:
        with torch.no_grad():
            tensor = local_part()
    return tensor.numel() * tensor.element_size()


def _existing(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

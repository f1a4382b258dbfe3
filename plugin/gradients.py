"""Bytes of gradients that exist and that will."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the gradients that exist."""
    return sum(tensor_bytes(p.grad) for p in parameters if p.grad is not None)


def pending_gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the gradients that backward has yet to allocate."""
    return sum(tensor_bytes(p) for p in parameters if p.requires_grad and p.grad is None)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()

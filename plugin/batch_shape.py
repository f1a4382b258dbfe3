"""The shape of a batch, as plans are made for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rematic.activations.nested import iter_leaves


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What decides how much memory a batch needs."""

    batch: int
    """Number of sequences."""

    length: int
    """Tokens (or positions) of each sequence, padding included."""

    padded: bool
    """Whether an attention mask hides some of them."""

    @property
    def tokens(self) -> int:
        """Batch size x length."""
        return self.batch * self.length


def default_batch_shape(batch: object) -> BatchShape:
    """Reads the largest tensor of a batch, token ids before others.

    Integers `(batch, length)` are token ids. (Masks `(batch, 1, length, length)` and positions
    `(3, batch, length)` are larger, and no measure of the batch.) Without any, floats
    `(batch, length, features)` are embeddings, `(batch, features)` have length 1, and
    `(batch, channels, height, width)` have height x width positions. Nested tensors (jagged ones)
    have their mean length. A batch without tensors counts as one token. `padded` reads
    `attention_mask`.
    """
    tensors = list(iter_leaves(batch))
    whole = [t for t in tensors if not t.is_floating_point() and not t.is_complex()]
    tokens = [t for t in whole if t.dim() == 2 and t.dtype != torch.bool]
    floats = [t for t in tensors if t.is_floating_point() and t.dim() >= 1]
    candidates = tokens or floats or [t for t in whole if t.dim() >= 1]
    if not candidates:
        return BatchShape(batch=1, length=1, padded=False)
    largest = max(candidates, key=_num_elements)
    batch_size, length = _extent(largest)
    return BatchShape(batch=batch_size, length=length, padded=_is_padded(batch))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_nested:
        lengths = [len(sequence) for sequence in tensor.unbind()]
        return len(lengths), math.ceil(sum(lengths) / max(len(lengths), 1))
    if tensor.dim() == 1:
        return int(tensor.shape[0]), 1
    if not tensor.is_floating_point() or tensor.dim() == 3:
        return int(tensor.shape[0]), int(tensor.shape[1])
    return int(tensor.shape[0]), math.prod(tensor.shape[2:])


def _num_elements(tensor: torch.Tensor) -> int:
    # the shape of a nested tensor holds symbols
    return sum(map(torch.numel, tensor.unbind())) if tensor.is_nested else tensor.numel()


def _is_padded(batch: object) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor):
        return False
    # on an accelerator the values would cost a synchronisation: a mask is taken at its word
    return mask.device.type != "cpu" or mask.is_nested or not bool(mask.all())

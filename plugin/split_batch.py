"""Splits a batch into micro-batches along its sequences, where the loss's reduction is declared."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rematic.activations.nested import iter_leaves, map_leaves

Reduction: TypeAlias = Literal["sum", "mean"] | Callable[[Any], float]
"""How a loss combines the sequences of a batch: their sum, their mean, or a mean over as many terms
as the function counts in a batch (tokens with a label, say)."""


def num_sequences(batch: object) -> int:
    """Returns how many sequences every tensor of a batch holds, 1 if they do not agree."""
    sizes = {int(t.shape[0]) if t.dim() and not t.is_nested else 1 for t in iter_leaves(batch)}
    return sizes.pop() if len(sizes) == 1 else 1


def split_batch(batch: object, num_parts: int) -> list[object]:
    """Returns a batch in parts of nearly equal numbers of sequences."""
    size = num_sequences(batch)
    edges = [size * i // num_parts for i in range(num_parts + 1)]
    return [
        map_leaves(functools.partial(_slice, start=start, stop=stop), batch)
        for start, stop in itertools.pairwise(edges)
    ]


def _slice(tensor: torch.Tensor, *, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop]


def batch_statistics(model: nn.Module) -> str | None:
    """Names a module whose output depends on the other sequences of the batch, None if none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return str(name)
    return None


def run_in_parts(
    fn: Callable[[Any], Any],
    batch: object,
    *,
    num_parts: int,
    reduction: Reduction,
    model: nn.Module,
) -> torch.Tensor | None:
    """Runs `fn`, which does forward and backward, on the parts of a batch.

    Gradients are those of the whole batch up to the order of their sums; dropout draws other
    numbers.

    Args:
        fn: Forward and backward; returns the loss.
        batch: The whole batch.
        num_parts: Number of parts.
        reduction: How the loss combines sequences.
        model: Its parameters receive the gradients.

    Returns:
        The loss of the whole batch, detached; None if `fn` returns none.

    Raises:
        ValueError: If `reduction` counts no terms in the batch.
    """
    parts = split_batch(batch, num_parts)
    shares = _shares(batch, parts, reduction)
    losses = []
    for part, share in zip(parts, shares, strict=True):
        if share == 0.0:  # its mean over no terms would be undefined
            continue
        handles = [] if share == 1.0 else _scaled(list(model.parameters()), share)
        try:
            loss = fn(part)
        finally:
            for handle in handles:
                handle.remove()
        if loss is not None:
            losses.append(torch.as_tensor(loss).detach() * share)
    return torch.stack(losses).sum() if losses else None


def _shares(batch: object, parts: Sequence[object], reduction: Reduction) -> list[float]:
    if reduction == "sum":
        return [1.0] * len(parts)
    count: Callable[[Any], float] = num_sequences if reduction == "mean" else reduction
    total = float(count(batch))
    if total <= 0:
        raise ValueError(
            f"reduction counted {total:g} terms in the batch: expected more than 0. Return the "
            "number of terms that the loss is the mean of."
        )
    return [float(count(part)) / total for part in parts]


def _scaled(parameters: Sequence[torch.Tensor], share: float) -> list[RemovableHandle]:
    def scale(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * share

    return [p.register_hook(scale) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call] # torch 2.13

"""Head and loss in slices of the tokens, so that the logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rematic.activations.token_losses import LossForm, TokenLosses

Reduction = Literal["mean", "sum", "none"]
DEFAULT_TILE_ELEMENTS = 1 << 24
"""Logits in one tile where the caller says nothing: 64 MiB in 32 bits."""


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | float | torch.Tensor | None = None,
    shift: bool = False,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    tile_tokens: int | None = None,
    num_tiles: int | None = None,
) -> torch.Tensor:
    """Returns `cross_entropy(linear(hidden, weight, bias).float(), labels)` without the logits.

    Forward computes the logits of `tile_tokens` tokens at a time and keeps two numbers a token.
    Backward computes every tile a second time: a third more products in the head (measured, on a
    CPU: 1.4 times its time), for which memory never holds more than one tile in 32 bits (in 16
    bits, and under a bound of the logits, one more in the head's dtype), however many tokens there
    are. Gradients are not computed in forward: the scale of the loss is known in backward only
    (16-bit gradients would vanish), and nothing as large as the weight waits in between.

    The result is not that of the plain loss bit for bit, because sums are taken in another order.
    Promised, relative to the plain loss in the same dtype (norm of the difference over the norm):

    | dtype | loss | gradient of hidden states | gradients of weight and bias |
    |---|---|---|---|
    | float32 | 1e-6 | 2e-6 | 2e-6 |
    | bfloat16 (also by autocast) | 1e-6 | 1e-2 | 1e-2 |
    | float16 (also by autocast) | 1e-6 | 2e-3 | 2e-3 |

    The loss itself is added up token by token in 32 bits after everything else, so the size of the
    tile changes it only as far as the matrix product depends on the number of its rows.

    Args:
        hidden: Hidden states `(..., hidden)`.
        weight: Weight of the head `(vocabulary, hidden)`, of the dtype of `hidden` (autocast casts
            both). Frozen or tied to an embedding, as in plain PyTorch.
        labels: Class of each token `(...)`.
        bias: Bias of the head `(vocabulary,)`.
        ignore_index: Label of tokens that have no loss.
        reduction: As in `torch.nn.functional.cross_entropy`; the mean of nothing is NaN.
        num_items: If given, the sum of the losses is divided by it, whatever `reduction` says: the
            number of labels in all micro-batches of an optimizer step.
        shift: Whether token i is to predict label i + 1.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        logit_scale: Factor on the logits.
        logit_softcap: Bound of the scaled logits, `softcap * tanh(logits / softcap)`.
        tile_tokens: Tokens in a slice; by default as many as have 2**24 logits.
        num_tiles: Number of slices, instead of `tile_tokens`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, or an option is out of its range.
    """
    form = LossForm(
        scale=logit_scale,
        softcap=logit_softcap,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    labels = _aligned_labels(hidden, labels, ignore_index=ignore_index, shift=shift)
    hidden, weight, bias = _cast_by_autocast(hidden, weight, bias)
    _check_head(hidden, weight, bias)
    size = tokens_in_a_tile(
        labels.numel(), len(weight), tile_tokens=tile_tokens, num_tiles=num_tiles
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    losses: torch.Tensor = TokenLosses.apply(  # type: ignore[no-untyped-call] # untyped in torch
        flat, weight, bias, labels.reshape(-1), form, size
    )
    return _reduced(losses, labels, ignore_index, reduction, num_items)


def tiled_head_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    form: LossForm | None = None,
    reduction: Reduction = "mean",
    num_items: int | float | torch.Tensor | None = None,
    shift: bool = False,
    tile_tokens: int,
) -> torch.Tensor:
    """Does what `tiled_cross_entropy` does for a head that is any token-wise module.

    Every slice runs under `torch.utils.checkpoint`, so that backward computes head and loss again
    and its autograd graph lives for one slice: about four tiles in memory instead of one, and
    gradients of the head are summed over slices in their own dtype. Random numbers that the head
    draws (dropout of an adapter) are right, but not those of the plain step.

    Args:
        head: Maps `(tokens, hidden)` to logits `(tokens, vocabulary)`.
        hidden: Hidden states `(..., hidden)`.
        labels: Class of each token `(...)`.
        form: What lies between the logits and the loss.
        reduction: As in `tiled_cross_entropy`.
        num_items: As in `tiled_cross_entropy`.
        shift: As in `tiled_cross_entropy`.
        tile_tokens: Tokens in a slice.
    """
    form = form or LossForm()
    labels = _aligned_labels(hidden, labels, ignore_index=form.ignore_index, shift=shift)
    rows = torch.split(hidden.reshape(-1, hidden.shape[-1]), tile_tokens)
    pairs = zip(rows, torch.split(labels.reshape(-1), tile_tokens), strict=True)

    def losses_of(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(part) * form.scale if form.scale != 1.0 else head(part)
        if form.softcap is not None:
            logits = torch.tanh(logits / form.softcap) * form.softcap
        return F.cross_entropy(
            logits.float(),
            targets,
            ignore_index=form.ignore_index,
            label_smoothing=form.label_smoothing,
            reduction="none",
        )

    losses = torch.cat([checkpoint(losses_of, *pair, use_reentrant=False) for pair in pairs])
    return _reduced(losses, labels, form.ignore_index, reduction, num_items)


def tokens_in_a_tile(
    num_tokens: int, vocabulary: int, *, tile_tokens: int | None, num_tiles: int | None
) -> int:
    """Returns the tokens of a slice, from what the caller gave of the two.

    Raises:
        ValueError: If both are given, or one is below 1.
    """
    if tile_tokens is not None and num_tiles is not None:
        raise ValueError(
            f"tile_tokens is {tile_tokens} and num_tiles is {num_tiles}: expected one of the two"
        )
    for name, value in (("tile_tokens", tile_tokens), ("num_tiles", num_tiles)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more")
    if tile_tokens is not None:
        return tile_tokens
    if num_tiles is not None:
        return max(1, -(-num_tokens // num_tiles))
    return max(1, DEFAULT_TILE_ELEMENTS // vocabulary)


def refuse_sharded(weight: torch.Tensor) -> None:
    """Raises a ValueError for a weight of which this rank holds a part only."""
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            "the head's weight is a DTensor, sharded over ranks: expected a whole weight. Leave "
            "the head out of tensor parallelism, and under FSDP shard it with the root module."
        )


def _aligned_labels(
    hidden: torch.Tensor, labels: torch.Tensor, *, ignore_index: int, shift: bool
) -> torch.Tensor:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)}, the hidden states "
            f"{tuple(hidden.shape)}: expected one label for each token, {tuple(hidden.shape[:-1])}"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}: expected class numbers (torch.int64)")
    labels = labels.to(hidden.device, torch.int64)
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift else labels


def _cast_by_autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    # Once and not in every tile: autocast caches nothing inside an autograd function.
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    refuse_sharded(weight)
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"the weight has the shape {tuple(weight.shape)}, the hidden states "
            f"{tuple(hidden.shape)}: expected (vocabulary, {hidden.shape[-1]})"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias has the shape {tuple(bias.shape)}: expected ({len(weight)},)")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != hidden.dtype or not tensor.is_floating_point():
            raise ValueError(
                f"the {name} is {tensor.dtype}, the hidden states are {hidden.dtype}: expected the "
                "same floating-point type. Cast one of them, or run under autocast."
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"the {name} is on {tensor.device}, the hidden states are on {hidden.device}: "
                "expected the same device; a head that is moved on demand cannot be tiled"
            )


def _reduced(
    losses: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    reduction: Reduction,
    num_items: int | float | torch.Tensor | None,
) -> torch.Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: expected 'mean', 'sum' or 'none'")
    if num_items is not None:
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.to(losses.device)
        return losses.sum() / num_items
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total / (labels != ignore_index).sum() if reduction == "mean" else total

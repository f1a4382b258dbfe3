"""The loss of every token, computed in tiles: the logits never exist whole, in either direction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """What lies between the head's product and the loss, and the loss itself."""

    scale: float = 1.0
    """Factor on the logits (Cohere, Granite)."""

    softcap: float | None = None
    """Bound of the logits, `softcap * tanh(logits / softcap)` (Gemma); None for no bound."""

    label_smoothing: float = 0.0
    """Share of the target's probability that all classes divide, 0 to 1."""

    ignore_index: int = -100
    """Label of the tokens that have no loss."""

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"logit_softcap is {self.softcap}: expected more than 0, or None")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}: expected 0 to 1")


@dataclass(frozen=True, slots=True)
class _Head:
    """Hidden states `(tokens, hidden)` and the linear head `(vocabulary, hidden)` above them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    form: LossForm

    @property
    def wide(self) -> torch.dtype:
        """The dtype of everything after the logits."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def product(self, rows: slice, columns: slice) -> torch.Tensor:
        """Returns one tile of the logits; `tanh(logits / softcap)` where there is a bound."""
        bias = None if self.bias is None else self.bias[columns]
        product = F.linear(self.hidden[rows], self.weight[columns], bias)
        if self.form.scale != 1.0:
            product.mul_(self.form.scale)
        if self.form.softcap is not None:
            product.div_(self.form.softcap).tanh_()
        return product

    def wide_logits(self, product: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """Returns the logits of a tile in `wide`; `in_place` may overwrite the product."""
        if self.form.softcap is not None:
            scaled = product.mul_ if in_place else product.mul
            product = scaled(self.form.softcap)
        return product.to(self.wide)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """What backward needs to find any tile of the softmax again, each `(tokens,)`."""

    maxima: torch.Tensor
    log_sums: torch.Tensor
    """log(sum(exp(logits - maxima))): kept apart from the maxima, their sum would round."""
    labels: torch.Tensor
    """Column of the target; 0 for an ignored token."""
    gradients: torch.Tensor
    """Gradient of the loss; 0 for an ignored token."""

    def logits_gradient(self, head: _Head, rows: slice, columns: slice) -> torch.Tensor:
        """Returns the gradient of one tile of the head's product, in the head's dtype."""
        form, num_columns = head.form, columns.stop - columns.start
        product = head.product(rows, columns)
        narrow, bounded = product.dtype, None if form.softcap is None else product
        tile = head.wide_logits(product, in_place=bounded is None)
        del product  # in 16 bits it would outlive its use
        tile.sub_(self.maxima[rows, None]).sub_(self.log_sums[rows, None]).exp_()
        if form.label_smoothing:
            tile.sub_(form.label_smoothing / len(head.weight))
        column = self.labels[rows, None] - columns.start
        inside = (column >= 0) & (column < num_columns)
        column.clamp_(0, num_columns - 1)
        target = tile.gather(1, column).sub_(inside.to(tile.dtype), alpha=1 - form.label_smoothing)
        tile.scatter_(1, column, target).mul_(self.gradients[rows, None])
        gradient = tile.to(narrow)
        if bounded is not None:
            gradient.mul_(bounded.mul_(bounded).neg_().add_(1.0))
        return gradient.mul_(form.scale) if form.scale != 1.0 else gradient


class TokenLosses(torch.autograd.Function):
    """Cross entropy of a linear head, per token.

    Forward keeps two numbers a token, backward computes each tile of the logits again. Where the
    weight needs a gradient, one of the two gradients must be summed over tiles: the smaller one
    is, in 32 bits, and the other comes out of single products, as in plain PyTorch.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's context, without a public type
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        form: LossForm,
        tile_tokens: int,
    ) -> torch.Tensor:
        """Returns the losses `(tokens,)` of `hidden` `(tokens, hidden)`, ignored ones 0."""
        ignored = labels == form.ignore_index
        labels = labels.masked_fill(ignored, 0)
        head = _Head(hidden, weight, bias, form)
        losses, maxima, log_sums = torch.empty(
            (3, len(hidden)), dtype=head.wide, device=hidden.device
        )
        with _no_autocast(hidden.device):
            for rows in _slices(len(hidden), tile_tokens):
                parts = _forward_tile(head, rows, labels[rows])
                losses[rows], maxima[rows], log_sums[rows] = parts
        ctx.save_for_backward(hidden, weight, bias, labels, ignored, maxima, log_sums)
        ctx.form, ctx.tile_tokens = form, tile_tokens
        result: torch.Tensor = losses.masked_fill(ignored, 0.0)
        return result

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of hidden states, weight and bias, where they are needed."""
        if torch.is_grad_enabled():  # create_graph; `once_differentiable` would drop it in silence
            raise RuntimeError(
                "a tiled loss has no second derivative: expected backward without create_graph. "
                "Use torch.nn.functional.cross_entropy where you need one."
            )
        hidden, weight, bias, labels, ignored, maxima, log_sums = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.form)
        # not a product: with every token ignored, the mean's gradient is infinite
        gradients = gradients.to(head.wide).masked_fill(ignored, 0.0)
        softmax = _Softmax(maxima, log_sums, labels, gradients)
        num_tokens, vocabulary = len(hidden), len(weight)
        by_vocabulary = ctx.needs_input_grad[1] and num_tokens < vocabulary
        found = _Gradients.zeros(head, ctx.needs_input_grad, by_vocabulary=by_vocabulary)
        with _no_autocast(hidden.device):
            if by_vocabulary:
                num_tiles = max(1, -(-num_tokens // ctx.tile_tokens))
                _backward_by_vocabulary(head, softmax, found, -(-vocabulary // num_tiles))
            else:
                _backward_by_tokens(head, softmax, found, ctx.tile_tokens)
        return (*found.cast(head), None, None, None)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients being filled, None where none is needed."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def zeros(cls, head: _Head, needed: tuple[bool, ...], *, by_vocabulary: bool) -> _Gradients:
        """Makes zeros: in 32 bits what is summed over tiles, in the head's dtype what is not."""
        narrow, wide = head.hidden.dtype, head.wide
        summed = {"hidden": by_vocabulary, "weight": not by_vocabulary, "bias": not by_vocabulary}

        def make(name: str, like: torch.Tensor | None, need: bool) -> torch.Tensor | None:
            if like is None or not need:
                return None
            return torch.zeros_like(
                like,
                dtype=wide if summed[name] else narrow,
                memory_format=torch.contiguous_format,
            )

        return cls(
            make("hidden", head.hidden, needed[0]),
            make("weight", head.weight, needed[1]),
            make("bias", head.bias, needed[2]),
        )

    def cast(self, head: _Head) -> list[torch.Tensor | None]:
        """Returns the gradients in the dtype of what they belong to."""
        dtype = head.hidden.dtype
        return [g if g is None else g.to(dtype) for g in (self.hidden, self.weight, self.bias)]


def _forward_tile(
    head: _Head, rows: slice, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns losses, maxima and log-sums of some tokens; the tile is overwritten on the way."""
    form, everything = head.form, slice(0, len(head.weight))
    tile = head.wide_logits(head.product(rows, everything), in_place=True)
    target = tile.gather(1, labels[:, None])[:, 0]
    if form.label_smoothing:
        target = torch.lerp(target, tile.mean(1), form.label_smoothing)
    maxima = tile.amax(1)
    log_sums = tile.sub_(maxima[:, None]).exp_().sum(1).log_()
    return log_sums + (maxima - target), maxima, log_sums


def _backward_by_tokens(
    head: _Head, softmax: _Softmax, found: _Gradients, tile_tokens: int
) -> None:
    everything = slice(0, len(head.weight))
    for rows in _slices(len(head.hidden), tile_tokens):
        gradient = softmax.logits_gradient(head, rows, everything)
        if found.hidden is not None:
            _add_product(found.hidden[rows], gradient, head.weight)
        if found.weight is not None:
            _add_product(found.weight, gradient.t(), head.hidden[rows])
        if found.bias is not None:
            found.bias.add_(gradient.sum(0, dtype=found.bias.dtype))
        del gradient  # before the next tile is made


def _backward_by_vocabulary(
    head: _Head, softmax: _Softmax, found: _Gradients, tile_columns: int
) -> None:
    everything = slice(0, len(head.hidden))
    for columns in _slices(len(head.weight), tile_columns):
        gradient = softmax.logits_gradient(head, everything, columns)
        if found.weight is not None:
            _add_product(found.weight[columns], gradient.t(), head.hidden)
        if found.bias is not None:
            found.bias[columns] = gradient.sum(0)
        if found.hidden is not None:
            _add_product(found.hidden, gradient, head.weight[columns])
        del gradient  # before the next tile is made


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    # (No `out=`: an op that writes into what it is given is not run again where memory runs out.)
    if total.dtype == left.dtype:
        total.addmm_(left, right)  # no product of its own
    else:
        total.add_(left @ right)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # The inputs have been cast already; backward may run under another autocast than forward.
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()

"""A head's inputs, the plain loss above them, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

IGNORED = -100
PROMISED = {
    torch.float64: {"loss": 1e-13, "gradient": 1e-13},
    torch.float32: {"loss": 1e-6, "gradient": 2e-6},
    torch.bfloat16: {"loss": 1e-6, "gradient": 1e-2},
    torch.float16: {"loss": 1e-6, "gradient": 2e-3},
}
"""The table of the docstring: norm of the difference over the norm."""


@dataclass(kw_only=True)
class Inputs:
    """What a head is given, with what needs a gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        parts = (self.hidden, self.weight, self.bias)
        hidden, weight, bias = (
            None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in parts
        )
        assert hidden is not None
        assert weight is not None
        return hidden, weight, bias


def make(
    tokens: tuple[int, ...] = (19,),
    *,
    hidden: int = 8,
    vocabulary: int = 23,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    ignored: str = "third",
    needs: str = "hidden weight bias",
    **options: Any,
) -> Inputs:
    torch.manual_seed(3)
    labels = torch.randint(0, vocabulary, tokens)
    flat = labels.view(-1)
    if ignored == "third":
        flat[::3] = IGNORED
    elif ignored == "first tile":
        flat[:5] = IGNORED
    elif ignored == "all":
        flat[:] = IGNORED
    return Inputs(
        hidden=torch.randn(*tokens, hidden).to(dtype).requires_grad_("hidden" in needs),
        weight=torch.randn(vocabulary, hidden).to(dtype).requires_grad_("weight" in needs),
        bias=torch.randn(vocabulary).to(dtype).requires_grad_("bias" in needs) if bias else None,
        labels=labels,
        options=options,
    )


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shift: bool = False,
    num_items: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """What causal language models of transformers do."""
    logits = F.linear(hidden, weight, bias)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    if shift:
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    reduction = reduction if num_items is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction, **options)
    loss = loss if num_items is None else loss / num_items
    return loss.view(labels.shape) if reduction == "none" else loss


Gradients = list[torch.Tensor | None]


def run(
    loss_of: Callable[..., torch.Tensor], inputs: Inputs, **more: Any
) -> tuple[torch.Tensor, Gradients]:
    hidden, weight, bias = inputs.fresh()
    loss = loss_of(hidden, weight, inputs.labels, bias=bias, **inputs.options, **more)
    # the mean's gradients are too small for float16 without a scale
    scaled = loss.sum() * (1024 if hidden.dtype == torch.float16 else 1)
    scaled.backward()
    return loss.detach(), [None if t is None else t.grad for t in (hidden, weight, bias)]


def assert_near(found: torch.Tensor | None, wanted: torch.Tensor | None, limit: float) -> None:
    if found is None or wanted is None:
        assert found is wanted
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).norm()
    assert difference <= limit * wanted.double().norm()

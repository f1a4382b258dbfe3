"""The loss of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Batch = Mapping[str, Tensor]
"""`input_ids` and `labels`, each of shape (batch, seq)."""


def language_model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of the next token; nothing else of the forward stays alive.

    Args:
        model: A causal language model of transformers.
        batch: `input_ids` and `labels` of shape (batch, seq).
    """
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss

"""The loss of a model of transformers."""

from __future__ import annotations

from torch import Tensor, nn

from rematic.training.batches import Batch
from rematic.training.tasks import accepts


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes; nothing else of the forward stays alive.

    Args:
        model: A model of transformers, with or without an adapter.
        batch: What it is called with, `labels` among it.
    """
    options = {"use_cache": False} if accepts(model, "use_cache") else {}
    loss: Tensor = model(**batch, **options).loss
    return loss

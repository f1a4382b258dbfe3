"""A training loop written out: what any user's own loop looks like, with nothing attached."""

from __future__ import annotations

import torch
from torch import Tensor

from rematic.recipes import Recipe
from rematic.training.batches import Batch
from rematic.training.loss import model_loss
from rematic.training.model_config import build_config
from rematic.training.model_size import size_of
from rematic.training.optimization import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    create_optimizer_state,
)
from rematic.training.prepared_model import prepare_model
from rematic.training.trained_module import batch_seed


class PlainLoop:
    """Model, optimizer and schedule of a recipe, driven one document at a time.

    Two loops of one recipe train bit-equally, in one process or in several: each document starts
    from a random state of its own.

    Args:
        recipe: Trained on a CPU, one optimizer step per document.
        max_length: Longest document, in tokens.
    """

    def __init__(self, recipe: Recipe, *, max_length: int) -> None:
        self._training = recipe.training
        config = build_config(recipe.model, max_length=max_length)
        self.model = prepare_model(recipe, config=config)
        self.optimizer = build_optimizer(self.model.parameters(), recipe.training)
        create_optimizer_state(self.optimizer)
        self._schedule = build_schedule(self.optimizer, recipe.training)

    @property
    def idle_bytes(self) -> int:
        """Bytes of weights and optimizer state, which stay between steps."""
        size = size_of(self.model)
        return size.weight_bytes + size.optimizer_bytes

    def start_document(self, number: int) -> None:
        """Sets the random state of the document with this number."""
        torch.manual_seed(batch_seed(self._training.seed, number=number))

    def forward_backward(self, batch: Batch) -> Tensor:
        """The loss of one document; its gradients are in the parameters."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._training.precision == "bf16"):
            loss = model_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """One optimizer step with the gradients there are; they are gone afterwards."""
        clip_gradients(self.model.parameters(), self._training.clip_norm)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

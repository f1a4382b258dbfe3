"""The Lightning module of a causal language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch import Tensor, nn

from rematic.training.loss import Batch, language_model_loss
from rematic.training.optimization import build_optimizer, build_schedule, clip_gradients

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from torch.optim import Optimizer

    from rematic.recipes import TrainingConfig


class LanguageModel(pl.LightningModule):
    """Trains a causal language model as a recipe says.

    Args:
        model: A causal language model of transformers.
        training: The training section of the recipe.
    """

    def __init__(self, model: nn.Module, *, training: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.training_config = training

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = language_model_loss(self.model, batch)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with the recipe's schedule, stepped with the optimizer."""
        optimizer = build_optimizer(self.parameters(), self.training_config)
        schedule = build_schedule(optimizer, self.training_config)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as a plain loop does; the arguments of the Trainer are not used."""
        clip_gradients(self.parameters(), self.training_config.clip_norm)

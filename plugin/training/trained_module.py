"""The Lightning module of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rematic.training.batches import Batch
from rematic.training.loss import model_loss
from rematic.training.optimization import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    restate_rates,
)
from rematic.training.sharding import shard_model

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from torch.optim import Optimizer

    from rematic.recipes import TrainingConfig


_BATCHES_KEY = "rematic_batches"
"""Where a checkpoint holds how many batches were trained."""


def batch_seed(seed: int, *, number: int, rank: int = 0) -> int:
    """Seed of the random numbers of one batch, the same in a run that was resumed.

    Args:
        seed: Of the recipe.
        number: Batches before it, over all epochs.
        rank: Which process this is.
    """
    return seed + 1_000_003 * (number + 1) + 7_368_787 * rank


class TrainedModule(pl.LightningModule):
    """Trains a model of transformers as a recipe says.

    A checkpoint holds what is trained; frozen weights are those that the recipe names.

    Args:
        model: The model, with its adapter.
        training: The training section of the recipe.
        total_steps: Optimizer steps in all.
        allow_code: Whether `_target_` may name a class outside the allow-list.
        sharded_units: Patterns of the units of a model that is to be sharded; None: it is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        training: TrainingConfig,
        total_steps: int | None = None,
        allow_code: bool = False,
        sharded_units: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.training_config = training
        self.batches_before = 0
        """Batches that were trained before the next one, over all epochs."""
        self.strict_loading = all(p.requires_grad for p in model.parameters())
        self._total_steps = total_steps
        self._allow_code = allow_code
        self._sharded_units = sharded_units

    def configure_model(self) -> None:
        """Shards the model where its strategy has made a mesh for it."""
        if self._sharded_units is not None and self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            shard_model(self.model, mesh, patterns=self._sharded_units)
            self._sharded_units = None  # Lightning calls this more than once

    def on_train_start(self) -> None:
        """A run that is resumed with another rate or weight decay goes on with those."""
        (optimizer,), (schedule,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        assert isinstance(schedule.scheduler, LambdaLR), "configure_optimizers has made it"
        restate_rates(optimizer, schedule.scheduler, self.training_config)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Every batch has random numbers of its own, so that a resumed run draws the same."""
        seed = self.training_config.seed
        torch.manual_seed(batch_seed(seed, number=self.batches_before, rank=self.global_rank))
        self.batches_before += 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = model_loss(self.model, batch)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The recipe's optimizer with its schedule, stepped with the optimizer."""
        optimizer = build_optimizer(
            self.parameters(), self.training_config, allow_code=self._allow_code
        )
        schedule = build_schedule(optimizer, self.training_config, total_steps=self._total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Lets gradients go with the step that used them.

        Lightning 2.6 does so behind the next forward, which would hold all of them.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as a plain loop does; the arguments of the Trainer are not used."""
        clip_gradients(self.parameters(), self.training_config.clip_norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves frozen weights out, with what describes packed ones."""
        checkpoint[_BATCHES_KEY] = self.batches_before
        if self.strict_loading or "state_dict" not in checkpoint:
            return
        kept = self._kept_names()
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name in kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another adapter, which a lenient load would pass over."""
        self.batches_before = checkpoint.get(_BATCHES_KEY, 0)
        found, wanted = set(checkpoint.get("state_dict", {})), self._kept_names()
        if not self.strict_loading and found != wanted:
            different = sorted(found ^ wanted)
            raise ValueError(
                f"the checkpoint does not hold what this recipe trains: {len(different)} names "
                f"differ, such as {', '.join(different[:3])}; resume with the recipe of the run"
            )

    def _kept_names(self) -> set[str]:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        packed = ("absmax", "quant_map", "nested", "quant_state", "SCB", "weight_format")
        buffers = {
            name
            for module_name, module in self.named_modules()
            for name in (
                f"{module_name}.{key}" if module_name else key
                for key in module._buffers
                if key not in module._non_persistent_buffers_set and not key.startswith(packed)
            )
        }
        return trained | buffers

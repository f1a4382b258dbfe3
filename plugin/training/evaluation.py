"""Takes the loss over documents that are not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from rematic.training.batches import Batch
from rematic.training.examples import NO_LOSS
from rematic.training.json_lines import JsonLines
from rematic.training.loader import BatchLoader
from rematic.training.loss import model_loss


class Evaluator(Callback):
    """Evaluates after every so many optimizer steps, or after each epoch, and at the end.

    Several processes share the batches. Each line of the file is one evaluation: `loss` is the
    mean over all labels.

    Args:
        loader: Hands out the documents, all of them to every process.
        path: The file; None: nothing is written, as by all processes but one.
        every_steps: Optimizer steps between evaluations; None: one after each epoch.
        shift: Whether a token predicts the label of the next one, so that the first is not used.
        notify: Is told the result in words.
    """

    def __init__(
        self,
        loader: BatchLoader,
        *,
        path: Path | None,
        every_steps: int | None,
        shift: bool,
        notify: Callable[[str], None],
    ) -> None:
        self._loader = loader
        self._shift = shift
        self._lines = None if path is None else JsonLines(path, notify=notify)
        self._every_steps = every_steps
        self._notify = notify
        self._done_at: int | None = None
        self._seen_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops results of steps that are trained again."""
        self._seen_step = trainer.global_step
        if self._lines is not None:
            self._lines.drop_after("optimizer_step", trainer.global_step)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Evaluates where it is due."""
        stepped = trainer.global_step != self._seen_step
        self._seen_step = trainer.global_step
        every = self._every_steps
        if stepped and every is not None and trainer.global_step % every == 0:
            self._evaluate(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates after the epoch, or what is left of it."""
        if self._every_steps is None:
            self._evaluate(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates the weights that remain."""
        self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._done_at == trainer.global_step:
            return
        self._done_at = trainer.global_step
        total, count = self._sums(trainer, module)
        loss = total / count
        if self._lines is not None:
            line = {
                "optimizer_step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "loss": loss,
                "labels": count,
            }
            self._lines.append(line)
            self._notify(f"evaluation after step {trainer.global_step}: loss {loss:.4f}")

    def _sums(self, trainer: pl.Trainer, module: pl.LightningModule) -> tuple[float, int]:
        """Sum of the losses of all labels, and their number, over all processes."""
        total = torch.zeros(2, dtype=torch.float64)
        with evaluating(module), trainer.precision_plugin.val_step_context():
            for batch, is_mine in self._shares(trainer):
                loss = module_loss(module, batch, module.device)
                count = num_labels(batch, shift=self._shift) if is_mine else 0
                total += torch.tensor([float(loss) * count, count], dtype=torch.float64)
        if trainer.world_size > 1:
            total = trainer.strategy.reduce(total.to(module.device), reduce_op="sum").cpu()
        return float(total[0]), int(total[1])

    def _shares(self, trainer: pl.Trainer) -> Iterator[tuple[Batch, bool]]:
        """Batches of this process; as many as the others have, the last ones without weight."""
        world, rank = trainer.world_size, trainer.global_rank
        batches = self._loader.batches(0)
        for first in range(0, len(batches), world):
            at = first + rank
            is_mine = at < len(batches)
            rows = batches[at if is_mine else 0]
            yield self._loader.make(rows), is_mine


def module_loss(module: pl.LightningModule, batch: Batch, device: torch.device) -> Tensor:
    """The loss of one batch, without the logits where training has none."""
    from rematic.hosts.transformers_loss import tiled_evaluation

    model = module.model
    assert isinstance(model, nn.Module), "the runner's module has a model"
    with tiled_evaluation():
        return model_loss(model, {key: value.to(device) for key, value in batch.items()})


def num_labels(batch: Batch, *, shift: bool) -> int:
    """Labels that the mean loss of a batch is taken over."""
    labels = batch["labels"]
    if labels.ndim == 1:
        return labels.numel()
    return int((labels[:, 1 if shift else 0 :] != NO_LOSS).sum())


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every part is in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode

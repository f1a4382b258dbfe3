"""One fit of Lightning on one of two ranks in which memory runs out where a trial says."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import distributed as dist
from torch.utils.data import DataLoader

import rematic
from benchmarks.rank_trials import (
    FAULTS,
    NUM_RANKS,
    Net,
    NeverFailed,
    Progress,
    Trial,
    batches_of,
    comes,
    expect,
    shard,
    values_of,
)
from rematic.callbacks import AdaptiveRecompute
from rematic.memory import SimulatedProbe


class Module(pl.LightningModule):
    """The network of the trials; logs its loss."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.body = Net()
        self.shards = trial.strategy == "lightning-fsdp2"

    def configure_model(self) -> None:
        """Shards itself where the strategy wants it."""
        if self.shards:
            shard(self.body, self.device_mesh["data_parallel"])
            self.shards = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss of one micro-batch."""
        loss: torch.Tensor = self.body(batch).square().mean()
        if comes(("loss", 0)):
            raise torch.OutOfMemoryError("injected in the loss")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Failures(pl.Callback):
    """Lets memory run out.

    A mode that fails ops is entered before the retry at the op is, so that this sees the error.
    """

    def __init__(self, trial: Trial, rank: int, progress: Progress) -> None:
        self._trial, self._rank, self._progress = trial, rank, progress
        self._open: SimulatedProbe | None = None
        self._step = -1

    def on_train_batch_start(self, *_: object) -> None:
        """Notes where memory runs out in this micro-batch."""
        self._step += 1
        expect(self._trial, self._rank, self._step)
        if self._trial.place == "op" and self._trial.fails(self._rank, self._step):
            self._enter(self._trial.failing_ops())

    def on_before_optimizer_step(self, *_: object) -> None:
        """Lets an update fail."""
        if self._trial.fails_in_update(self._rank, self._step):
            self._enter(self._trial.failing_update())

    def on_train_batch_end(self, *_: object) -> None:
        """Looks whether it did."""
        probe = self._leave()
        if FAULTS or (probe is not None and not probe.num_ooms):
            raise NeverFailed(f"{FAULTS} {probe and probe.num_ops}")
        self._progress()

    def on_exception(self, *_: object) -> None:
        """Leaves no mode behind."""
        self._leave()

    def _enter(self, probe: SimulatedProbe) -> None:
        self._open = probe
        probe.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> SimulatedProbe | None:
        probe, self._open = self._open, None
        if probe is not None:
            probe.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return probe


def _entry(trial: Trial, *, faulty: bool) -> tuple[Strategy, list[pl.Callback]]:
    sharded = trial.strategy == "lightning-fsdp2"
    options: dict[str, Any] = {"process_group_backend": "gloo"}
    if sharded:  # by itself the plain one would shard nothing and split tensors
        options |= {"data_parallel_size": NUM_RANKS, "tensor_parallel_size": 1}
    if not faulty:
        return (ModelParallelStrategy if sharded else DDPStrategy)(**options), []
    ours: dict[str, Any] = {"policy": "keep", "recipe": trial.recipe, "budget": "64GiB"}
    if trial.strategy == "lightning-callback":
        return DDPStrategy(**options), [AdaptiveRecompute(**ours)]
    kind = rematic.RecomputeModelParallelStrategy if sharded else rematic.RecomputeDDPStrategy
    return kind(**ours, **options), []


def fit(
    trial: Trial, rank: int, *, faulty: bool, progress: Progress = lambda: None
) -> dict[str, torch.Tensor]:
    """Fits one epoch; returns what must have the same bits, logged metrics among it.

    Raises:
        NeverFailed: If memory was to run out somewhere and has not.
    """
    FAULTS.clear()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(NUM_RANKS))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")  # the process group is there already
    torch.manual_seed(0)
    module = Module(trial)
    strategy, callbacks = _entry(trial, faulty=faulty)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_RANKS,
        max_epochs=1,
        accumulate_grad_batches=trial.accumulate,
        callbacks=[*callbacks, Failures(trial, rank, progress)] if faulty else callbacks,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    torch.manual_seed(40 + rank)
    trainer.fit(module, DataLoader(batches_of(rank), batch_size=None))  # type: ignore[arg-type]
    dist.barrier()
    metrics = {f"metric {k}": v.detach().clone() for k, v in trainer.callback_metrics.items()}
    return {**values_of(module), **metrics}

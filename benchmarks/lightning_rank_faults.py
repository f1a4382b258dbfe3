"""Lets memory run out on one of two ranks of a Lightning fit over DDP, in forward and in backward.

Weights, buffers and logged metrics of both ranks must be those of the fit without rematic.

    .venv/bin/torchrun --nproc_per_node 2 benchmarks/lightning_rank_faults.py

Prints a JSON line for each fit and rank; half a minute on two cores.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the module is that of the tests

from rematic.callbacks import AdaptiveRecompute
from rematic.recipes import PolicyConfig, Recipe
from tests.hosts.lightning_fits import Net, loader_of_batches

FAILING = {1: "forward", 2: "backward"}
"""Where memory runs out on the second rank, by number of the batch."""
_pending: list[str] = []


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
        _fail("backward")
        return gradient


def _fail(place: str) -> None:
    if place in _pending:
        _pending.remove(place)
        raise torch.OutOfMemoryError(f"injected in {place}")


class FaultyNet(Net):
    """Runs out of memory where it is told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, width)` to `(batch, 1)`."""
        for i, block in enumerate(self.blocks):
            x = _Point.apply(block(x)) if i == 1 else block(x)
        _fail("forward")
        return self.head(x)


class _Failures(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and batch_idx in FAILING:
            _pending.append(FAILING[batch_idx])


def fit(strategy: str, accumulate: int, *, faulty: bool) -> tuple[dict[str, Any], int]:
    """Trains two epochs; returns everything that must be the same, and the rank."""
    pl.seed_everything(3, verbose=False)
    recipe = Recipe(policy=PolicyConfig(op_retry="never", trust=("*",)))
    recompute = [AdaptiveRecompute(policy="keep", recipe=recipe), _Failures()]
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        callbacks=recompute if faulty else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FaultyNet()
    trainer.fit(module, DataLoader(loader_of_batches().dataset, batch_size=4, drop_last=True))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**module.state_dict(), **metrics}, trainer.global_rank


def main() -> int:
    """Prints one line for each fit; 1 if any differs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    failed = False
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        for accumulate in (1, 2):
            wanted, rank = fit(strategy, accumulate, faulty=False)
            found, _ = fit(strategy, accumulate, faulty=True)
            same = [
                torch.equal(torch.as_tensor(found[n]), torch.as_tensor(v))
                for n, v in wanted.items()
            ]
            row = {"strategy": strategy, "accumulate": accumulate, "rank": rank, "same": all(same)}
            print(json.dumps({**row, "left": _pending}), flush=True)
            failed |= not all(same) or bool(_pending)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Loops of `idle_overhead.py` through a Trainer of Lightning, one strategy each.

The fit runs in a thread of its own, which waits for the next batch until a step is asked for: so
all that a Trainer does for a batch is in the step, with rematic's strategy and with Lightning's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import rematic

UNLIMITED = "64GiB"
MAX_STEPS = 1_000_000


class Fit:
    """A fit that goes on by one batch at a time.

    Args:
        run: Runs the fit over the loader that it is given, to its end.
        batch: Every batch.
    """

    def __init__(self, run: Callable[[Fit], None], batch: object) -> None:
        self._run = run
        self._batch = batch
        self._ends = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        self._wait()

    def __len__(self) -> int:
        return MAX_STEPS  # without a length Lightning fetches one batch ahead

    def __iter__(self) -> Iterator[object]:
        while True:
            self._done.release()
            self._go.acquire()
            if self._ends:
                return
            yield self._batch

    def step(self) -> None:
        """Trains on one batch."""
        self._go.release()
        self._wait()

    def close(self) -> None:
        """Lets the fit end."""
        self._ends = True
        self.step()
        self._thread.join()

    def _fit(self) -> None:
        try:
            self._run(self)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


def start_fit(model: nn.Module, batch: dict[str, torch.Tensor], attached: bool, kind: str) -> Fit:
    """Starts a fit of a model of Transformers on one device.

    Args:
        model: The model, whose blocks are `model.layers`.
        batch: Its keyword arguments.
        attached: Whether the strategy is rematic's.
        kind: Which strategy: `one`, `ddp` or `fsdp2`.
    """
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if kind == "fsdp2":
                _shard(model, self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    trainer = pl.Trainer(
        strategy=_strategy(kind, attached=attached),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return Fit(lambda loader: trainer.fit(Module(), loader), batch)


def _strategy(kind: str, *, attached: bool) -> Any:  # noqa: ANN401 - one of Lightning's
    from lightning.pytorch import strategies

    ours: dict[str, Any] = {"budget": UNLIMITED} if attached else {}
    if kind == "one":
        return rematic.RecomputeStrategy(**ours) if attached else "auto"
    gloo = {"process_group_backend": "gloo", **ours}
    if kind == "ddp":
        return (rematic.RecomputeDDPStrategy if attached else strategies.DDPStrategy)(**gloo)
    make = rematic.RecomputeModelParallelStrategy if attached else strategies.ModelParallelStrategy
    return make(data_parallel_size=1, tensor_parallel_size=1, **gloo)


def _shard(model: Any, mesh: Any) -> None:  # noqa: ANN401 - of transformers, and a DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

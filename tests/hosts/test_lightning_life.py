"""What else a Trainer may do with a fit: each is as it is without rematic, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.hosts.lightning_fits import WIDTH, Fitted, Net, Runner, ValidatedNet

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",  # that of the plain fit
)
ENTRIES = ("strategy", "callback")
ROOMY = "64GiB"


class TunedNet(Net):
    """A net whose batch size and learning rate can be looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32, WIDTH, generator=generator)
        data = TensorDataset(x, torch.randn(32, 1, generator=generator))
        return DataLoader(data, batch_size=self.batch_size)


class GeneratingNet(Net):
    """Runs its blocks without gradients in the middle of a step, as `generate` does."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.eval()
        with torch.no_grad():
            sample = self(x)
        self.train()
        with torch.inference_mode():
            self.losses.append(float(self.head(x).sum()))
        return super().training_step((x, y + 0.1 * sample), batch_idx)


class LargeNet(TunedNet):
    """A net that no more than four samples fit into, whatever is recomputed."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)


def callbacks_of(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()]}


LIVES: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "early stopping": (
        ValidatedNet,
        lambda: {
            "callbacks": [EarlyStopping("val_loss", patience=1, mode="max")],
            "max_epochs": 6,
            "validation": True,
        },
    ),
    "best checkpoint": (
        ValidatedNet,
        lambda: {
            "callbacks": [ModelCheckpoint(monitor="val_loss", save_top_k=1)],
            "enable_checkpointing": True,
            "validation": True,
        },
    ),
    "growing accumulation": (
        Net,
        callbacks_of(lambda: GradientAccumulationScheduler({0: 1, 1: 3})),
    ),
    "stochastic weight averaging": (
        TunedNet,  # no schedule of its own
        lambda: {
            "callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
            "max_epochs": 4,
        },
    ),
    "averaged weights": (Net, callbacks_of(lambda: EMAWeightAveraging(decay=0.9))),
    "overfitting": (Net, lambda: {"overfit_batches": 2}),
    "sanity checking": (
        ValidatedNet,
        lambda: {"num_sanity_val_steps": 2, "validation": True},
    ),
    "gradients in validation": (
        ValidatedNet,
        lambda: {"inference_mode": False, "validation": True},
    ),
    "generation inside the step": (GeneratingNet, dict),
}


def fit_with(runner: Runner, entry: str, life: str) -> Fitted:
    module, options = LIVES[life]
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    chosen = options()
    callbacks = [*chosen.pop("callbacks", ()), *arguments.pop("callbacks", ())]
    return runner.fit(module, callbacks=callbacks, **chosen, **arguments)


@pytest.mark.filterwarnings(
    "ignore:You requested to overfit but enabled training dataloader shuffling",
    "ignore:Found .* module.* in eval mode at the start of training",
)
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_as_without_rematic(runner: Runner, entry: str, life: str) -> None:
    fitted = fit_with(runner, entry, life)
    fitted.is_same_as(fit_with(runner, "plain", life))
    assert fitted.session.num_steps > 0
    assert sum(block.calls.count(replays=True) for block in fitted.module.blocks) > 0


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_second_fit_of_the_same_module_goes_on(runner: Runner, entry: str) -> None:
    def twice(entry: str) -> Fitted:
        first = runner.fit(**runner.entry(entry, policy="recompute", budget=ROOMY))
        more = runner.entry(entry, policy="recompute", budget=ROOMY)
        return runner.fit(first.module, seed=8, **more)

    twice(entry).is_same_as(twice("plain"))


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_bar_shows_policy_and_memory(runner: Runner, bar: type[Any]) -> None:
    seen: list[dict[str, Any]] = []

    class Watched(bar):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(trainer, *args, **kwargs)
            seen.append(dict(self.get_metrics(trainer, trainer.lightning_module)))

    arguments = runner.entry("strategy", policy="recompute", budget=ROOMY)
    shown = Watched()
    runner.fit(callbacks=[shown], enable_progress_bar=True, **arguments)
    assert {row["policy"] for row in seen} == {"recompute"}
    assert all(row["memory"].endswith(" of 64.0 GiB") for row in seen)
    assert "loss" in str(seen[0])
    assert "get_metrics" not in vars(shown)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_learning_rate_is_found_as_without_rematic(runner: Runner, entry: str) -> None:
    def found(entry: str) -> tuple[float, Fitted]:
        arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
        finder = LearningRateFinder(num_training_steps=10)
        callbacks = [*arguments.pop("callbacks", ()), finder]
        fitted = runner.fit(TunedNet, callbacks=callbacks, enable_checkpointing=True, **arguments)
        return fitted.module.lr, fitted

    rate, fitted = found(entry)
    plain_rate, plain = found("plain")
    assert rate == plain_rate
    fitted.is_same_as(plain)


@pytest.mark.parametrize(("module", "size"), [(TunedNet, 8), (LargeNet, 4)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_batch_size_is_found_as_without_rematic(
    runner: Runner, entry: str, module: type[Net], size: int
) -> None:
    def found(entry: str) -> Fitted:
        arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
        finder = BatchSizeFinder(steps_per_trial=2, max_trials=3)
        callbacks = [*arguments.pop("callbacks", ()), finder]
        return runner.fit(module, callbacks=callbacks, enable_checkpointing=True, **arguments)

    fitted, plain = found(entry), found("plain")
    assert fitted.module.batch_size == plain.module.batch_size == size
    fitted.is_same_as(plain)

"""A model, its data, and a Trainer that notes all that a user could see of a fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric

import rematic
import rematic.callbacks
from rematic.recipes import PolicyConfig, Recipe

WIDTH = 16
NUM_BLOCKS = 4
NUM_BATCHES = 7


class Calls:
    """The calls of a block, beyond what a replay restores: True for a replay."""

    __slots__ = ("replays",)  # what objects hold in their `__dict__` a replay does restore

    def __init__(self) -> None:
        self.replays: list[bool] = []

    def count(self, *, replays: bool) -> int:
        return self.replays.count(replays)


class Block(nn.Module):
    """Dropout and batch norm; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.replays.append(rematic.replaying())
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Net(pl.LightningModule):
    """Logs in every way, and keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.log("sum", x.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        loss = ((self(x) - y) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.mean.update(loss.detach())
        self.all.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return {"loss": loss, "batch_idx": batch_idx}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ValidatedNet(Net):
    """The same with validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", ((self(batch[0]) - batch[1]) ** 2).mean())


class Hooks(Callback):
    """Counts the hooks of a fit."""

    NAMES = (
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_epoch_end",
    )

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        for name in self.NAMES:
            setattr(self, name, lambda *_, name=name, **__: self.counts.update([name]))


class Notes(Logger):
    """Keeps what is logged."""

    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Recorded:
    """A journal in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Any) -> None:
        self.events.append(dict(event))


@dataclass(kw_only=True)
class Fitted:
    """A fit that is over, and what came of it."""

    module: pl.LightningModule
    trainer: pl.Trainer
    session: rematic.Session | None
    generator: Tensor
    logged: list[tuple[int | None, dict[str, float]]]
    """What the user logged."""
    figures: list[tuple[int | None, dict[str, float]]]
    """What rematic did."""
    hooks: Counter[str]

    def visible(self) -> dict[str, Any]:
        """All that must not differ from a plain fit."""
        return {
            "losses": self.module.losses,
            "weights": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "schedules": [c.scheduler.state_dict() for c in self.trainer.lr_scheduler_configs],
            "scaler": self.trainer.precision_plugin.state_dict(),
            "generator": self.generator,
            "logged": self.logged,
            "metrics": {k: float(v) for k, v in self.trainer.callback_metrics.items()},
            "hooks": self.hooks,
            "global_step": self.trainer.global_step,
        }

    def is_same_as(self, other: Fitted) -> None:
        """Asserts that nothing visible differs by a bit."""
        mine, theirs = self.visible(), other.visible()
        for name, value in mine.items():
            assert _frozen(value) == _frozen(theirs[name]), name


@dataclass(kw_only=True)
class Runner:
    """Runs fits of one kind."""

    registry: pytest.MonkeyPatch
    folder: Path

    def entry(self, entry: str, **arguments: Any) -> dict[str, Any]:
        """Arguments of a Trainer that bring rematic in; none for `plain`."""
        if entry == "plain":
            return {}
        # the safety check would run one block once more than the tests count
        arguments.setdefault("recipe", Recipe(policy=PolicyConfig(trust=("*",))))
        if entry == "callback":
            return {"callbacks": [rematic.callbacks.AdaptiveRecompute(**arguments)]}
        if entry == "strategy":
            return {"strategy": rematic.RecomputeStrategy(**arguments)}
        self.registry.setitem(StrategyRegistry["recompute"], "init_params", arguments)
        return {"strategy": "recompute"}

    def trainer(self, *, precision: str = "fp32", **options: Any) -> pl.Trainer:
        """A quiet Trainer on one CPU."""
        if precision == "fp16":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        elif precision == "bf16":
            options["precision"] = "bf16-mixed"
        defaults: dict[str, Any] = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "log_every_n_steps": 1,
            "logger": Notes(),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        options["callbacks"] = [*options.get("callbacks", ()), Hooks()]
        return pl.Trainer(**{**defaults, **options})

    def fit(
        self,
        module: pl.LightningModule | Callable[[], pl.LightningModule] = Net,
        *,
        trainer: pl.Trainer | None = None,
        validation: bool = False,
        ckpt_path: Path | None = None,
        seed: int = 7,
        **options: Any,
    ) -> Fitted:
        """Fits from a seed; a module or Trainer that is given goes on as it is."""
        pl.seed_everything(seed, verbose=False)
        if not isinstance(module, pl.LightningModule):
            module = module()
        trainer = trainer or self.trainer(**options)
        brings_data = type(module).train_dataloader is not pl.LightningModule.train_dataloader
        loader = None if brings_data else loader_of_batches()
        trainer.fit(module, loader, loader if validation else None, ckpt_path=ckpt_path)
        notes = trainer.logger.metrics if isinstance(trainer.logger, Notes) else []
        logged = [(step, {k: float(v) for k, v in m.items()}) for step, m in notes]
        return Fitted(
            module=module,
            trainer=trainer,
            session=session_of(trainer),
            generator=torch.get_rng_state(),
            logged=[(step, m) for step, m in logged if not _is_ours(m)],
            figures=[(step, m) for step, m in logged if _is_ours(m)],
            hooks=next(c.counts for c in trainer.callbacks if isinstance(c, Hooks)),
        )


def _is_ours(metrics: dict[str, float]) -> bool:
    return bool(metrics) and all(name.startswith("rematic/") for name in metrics)


def session_of(trainer: pl.Trainer) -> rematic.Session | None:
    """The session of the strategy or of the callback."""
    for part in (trainer.strategy, *trainer.callbacks):
        if isinstance(part, (rematic.RecomputeStrategy, rematic.callbacks.AdaptiveRecompute)):
            return part.session
    return None


def attributes_of(module: nn.Module) -> dict[str, set[str]]:
    """The names of what hangs on each part, without `_hparams`, which is Lightning's own."""
    return {name: set(vars(part)) - {"_hparams"} for name, part in module.named_modules()}


def loader_of_batches() -> DataLoader[tuple[Tensor, ...]]:
    """Seven batches, the last one smaller."""
    generator = torch.Generator().manual_seed(0)
    size = 4 * NUM_BATCHES - 2
    x = torch.randn(size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, torch.randn(size, 1, generator=generator)), batch_size=4)


def _frozen(value: Any) -> Any:
    """The same with tensors as their bytes, so that NaN and -0.0 are told apart as bits are."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _frozen(dataclasses.asdict(value))
    return value

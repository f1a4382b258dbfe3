"""A callback that puts rematic under any strategy of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rematic.batch_shape import BatchShape
from rematic.hosts.instance_method import InstanceMethod
from rematic.hosts.lightning_driver import LightningDriver
from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe
from rematic.session import Session


class AdaptiveRecompute(Callback):
    """Trains inside a memory budget, over the strategy that the Trainer has.

    `Trainer(strategy="ddp", callbacks=[AdaptiveRecompute(budget="20GiB")])`.

    The state in a checkpoint is that of `rematic.RecomputeStrategy`: either resumes the other.

    Args:
        recipe: `auto`, a recipe's name, a path, or a recipe.
        budget: Bytes that may be in use on each device, weights and optimizer included, such as
            `20GiB`, a share of the device such as 0.9, or `auto`; instead of the recipe's. On a
            CPU it must be given.
        policy: A policy or the name of one (`planned`, `keep`, `selective`, `recompute`,
            `recompute+offload`, `offload`, `compress`); instead of the recipe's.
        probe: `auto`, `host`, `cuda`, or a probe; instead of the recipe's.
        batch_shape: Reads a batch; None for the largest tensor in it, integers first.
        journal: Takes the decisions, such as a `rematic.journal.JournalWriter`.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = "auto",
        budget: int | float | str | None = None,
        policy: str | Policy | None = None,
        probe: str | Probe | None = None,
        batch_shape: Callable[[object], BatchShape] | None = None,
        journal: EventSink | None = None,
    ) -> None:
        self._driver = LightningDriver(
            recipe=recipe,
            budget=budget,
            policy=policy,
            probe=probe,
            batch_shape=batch_shape,
            journal=journal,
        )
        self._seams: list[InstanceMethod] = []

    @property
    def session(self) -> Session | None:
        """The session of the fit that runs or ran last; None before the first."""
        return self._driver.session

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses Trainers that cannot be driven."""
        if not isinstance(trainer, pl.Trainer):
            raise ValueError(
                f"AdaptiveRecompute was given to a {type(trainer).__module__.partition('.')[0]} "
                "Trainer: expected one of lightning.pytorch. Write `from lightning.pytorch import "
                "Trainer, LightningModule`."
            )
        if isinstance(trainer.strategy, SessionStrategy):
            raise ValueError(
                "AdaptiveRecompute was given to a Trainer with "
                f"{type(trainer.strategy).__name__}: expected one of "
                "the two, since they do the same. Remove the callback."
            )

        if isinstance(trainer.strategy, FSDPStrategy):
            raise ValueError(
                "AdaptiveRecompute was given to a Trainer with FSDPStrategy, which wraps the units "
                "before a callback can attach to them: expected rematic.RecomputeFSDPStrategy "
                "with the same arguments, and no callback."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attaches to the module and to the two seams of the strategy."""
        self._driver.attach(pl_module)
        strategy, driver = trainer.strategy, self._driver

        def training_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
            return driver.training_step(step, args, kwargs, optimizers=strategy.optimizers)

        def backward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
            return driver.backward(inner, args, kwargs)

        self._seams = [
            InstanceMethod(strategy, "training_step", training_step),
            InstanceMethod(strategy, "backward", backward),
        ]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Covers the optimizers before they step."""
        self._driver.cover(trainer.strategy.optimizers)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives loggers what the last steps took."""
        self._driver.log_last_figures()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves model, optimizers and strategy as they were."""
        self._detach()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Does the same after an exception, when Lightning does not call `teardown`."""
        self._driver.abort(exception)
        self._driver.explain(exception, trainer)
        self._detach()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Does the same when a fit is left in another way."""
        self._detach()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the session's state."""
        self._driver.save(checkpoint)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the session's state when fitting."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._driver.load(checkpoint)

    def _detach(self) -> None:
        for seam in reversed(self._seams):
            seam.remove()
        self._seams = []
        self._driver.detach()

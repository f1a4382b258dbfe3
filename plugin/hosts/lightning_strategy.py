"""What the strategies for `lightning.pytorch` have in common: each drives a Session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from rematic.batch_shape import BatchShape
from rematic.control import StopReport
from rematic.hosts.lightning_driver import LightningDriver
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe
from rematic.session import Session


class SessionStrategy(Strategy):
    """Goes before a strategy of Lightning in the bases of a class, and drives a session over it.

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
        **kwargs: The arguments of the strategy.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = "auto",
        budget: int | float | str | None = None,
        policy: str | Policy | None = None,
        probe: str | Probe | None = None,
        batch_shape: Callable[[object], BatchShape] | None = None,
        journal: EventSink | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._driver = LightningDriver(
            recipe=recipe,
            budget=budget,
            policy=policy,
            probe=probe,
            batch_shape=batch_shape,
            journal=journal,
        )

    @property
    def session(self) -> Session | None:
        """The session of the fit that runs or ran last; None before the first."""
        return self._driver.session

    @override
    def model_to_device(self) -> None:
        """Moves the model, and attaches when fitting: on the device, before DDP wraps it."""
        super().model_to_device()  # type: ignore[safe-super] # of the strategy behind it
        self.attach_when_fitting()

    def attach_when_fitting(self) -> None:
        """Attaches the module for the fit that begins."""
        if self.is_fitting() and not self._driver.is_attached:
            assert self.lightning_module is not None
            self._driver.attach(self.lightning_module, self.root_device)

    def is_fitting(self) -> bool:
        """Returns whether the Trainer fits."""
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @override
    def on_train_start(self) -> None:
        """Covers the optimizers before they step."""
        super().on_train_start()
        self._driver.cover(self.optimizers)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the module's `training_step` as a step of the session."""
        output: STEP_OUTPUT = self._driver.training_step(
            super().training_step, args, kwargs, optimizers=self.optimizers
        )
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs backward, with which the session's step ends in automatic optimization."""
        return self._driver.backward(super().backward, args, kwargs)

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Saves the Trainer's checkpoint and the session's state with it."""
        self._driver.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint, and the session's state from it when fitting."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.is_fitting():
            self._driver.load(checkpoint)
        return checkpoint

    def save_emergency_checkpoint(self, report: StopReport, path: Path) -> str:
        """Saves a training that stops, as it was behind the last optimizer step; returns where.

        Args:
            report: Why it stops.
            path: The file.

        Raises:
            NotSavedError: If it should not be saved.
        """
        return self._driver.save_emergency_checkpoint(report, path)

    def stop(self, exception: BaseException) -> None:
        """Saves a training that ran out of memory outside of a step; safe to call twice."""
        self._driver.abort(exception)

    @override
    def on_train_end(self) -> None:
        """Gives loggers what the last steps took."""
        self._driver.log_last_figures()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Ends a step that an exception outside of it interrupted."""
        self.stop(exception)
        if self.lightning_module is not None:
            self._driver.explain(exception, self.lightning_module.trainer)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Leaves model and optimizers as they were, after a fit and after an exception."""
        self._driver.detach()
        super().teardown()

    def __repr__(self) -> str:
        # `pytorch_lightning` refuses the strategy with its repr and little else
        name = type(self).__name__
        return f"<{name} for a Trainer of lightning.pytorch, not of pytorch_lightning>"

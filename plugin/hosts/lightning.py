"""Strategies for `lightning.pytorch` that train with rematic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from rematic.batch_shape import BatchShape
from rematic.hosts.lightning_driver import LightningDriver
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe
from rematic.session import Session


class RecomputeStrategy(SingleDeviceStrategy):
    """Trains on one device, inside a memory budget.

    Registered as `"recompute"` once `rematic.callbacks` is imported. The device is the Trainer's:
    `Trainer(strategy=RecomputeStrategy(budget="20GiB"), accelerator="gpu", devices=1)`.

    Args:
        recipe: `auto`, a recipe's name, a path, or a recipe.
        budget: Bytes that may be in use, weights and optimizer included, such as `20GiB`, a share
            of the device such as 0.9, or `auto`; instead of the recipe's. On a CPU it must be
            given.
        policy: A policy or the name of one (`planned`, `keep`, `selective`, `recompute`,
            `recompute+offload`, `offload`); instead of the recipe's.
        probe: `auto`, `host`, `cuda`, or a probe; instead of the recipe's.
        batch_shape: Reads a batch; None for the largest tensor in it, integers first.
        journal: Takes the decisions, such as a `rematic.journal.JournalWriter`.
        accelerator: As of every strategy; None for the Trainer's.
        checkpoint_io: As of every strategy; None for the Trainer's.
        precision_plugin: As of every strategy; None for the Trainer's.
    """

    strategy_name = "recompute"

    def __init__(
        self,
        recipe: str | Path | Recipe = "auto",
        budget: int | float | str | None = None,
        policy: str | Policy | None = None,
        probe: str | Probe | None = None,
        batch_shape: Callable[[object], BatchShape] | None = None,
        journal: EventSink | None = None,
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        # Without `device`: LightningCLI gives every argument that it finds, this one as "cpu".
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._device: torch.device | None = None
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

    @property
    @override
    def root_device(self) -> torch.device:
        """The Trainer's device; the CPU before there is a Trainer."""
        return self._device or torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The Trainer's devices, at most one; Lightning assigns them."""
        return [] if self._device is None else [self._device]

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        _refuse_several("devices", len(devices), ", ".join(str(device) for device in devices))
        self._device = next(iter(devices), None)

    @property
    def num_nodes(self) -> int:
        """Always one; Lightning assigns the Trainer's."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        _refuse_several("num_nodes", num_nodes, f"{num_nodes} nodes")

    @override
    def model_to_device(self) -> None:
        """Moves the model, and attaches when fitting: on the device, before anything wraps it."""
        super().model_to_device()
        if self._is_fitting() and not self._driver.is_attached:
            assert self.lightning_module is not None
            self._driver.attach(self.lightning_module)

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
        if self._is_fitting():
            self._driver.load(checkpoint)
        return checkpoint

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Ends a step that an exception outside of it interrupted."""
        self._driver.abort(exception)
        if self.lightning_module is not None:
            self._driver.explain(exception, self.lightning_module.trainer)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Leaves model and optimizers as they were, after a fit and after an exception."""
        self._driver.detach()
        super().teardown()

    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def __repr__(self) -> str:
        # `pytorch_lightning` refuses the strategy with its repr and little else
        return "<RecomputeStrategy for a Trainer of lightning.pytorch, not of pytorch_lightning>"


def _refuse_several(argument: str, number: int, found: str) -> None:
    if number > 1:
        raise ValueError(
            f"RecomputeStrategy trains on one device, but the Trainer has {found}: expected "
            f"Trainer({argument}=1). The callback goes over other strategies, tested with one "
            "process so far: "
            "Trainer(strategy='ddp', callbacks=[rematic.callbacks.AdaptiveRecompute(...)])."
        )

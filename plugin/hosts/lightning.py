"""The strategy for `lightning.pytorch` that trains on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from rematic.batch_shape import BatchShape
from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe


class RecomputeStrategy(SessionStrategy, SingleDeviceStrategy):
    """Trains on one device, inside a memory budget.

    Registered as `"recompute"` once `rematic.callbacks` is imported. The device is the Trainer's:
    `Trainer(strategy=RecomputeStrategy(budget="20GiB"), accelerator="gpu", devices=1)`.

    Args:
        recipe: `auto`, a recipe's name, a path, or a recipe.
        budget: Bytes that may be in use, weights and optimizer included, such as `20GiB`, a share
            of the device such as 0.9, or `auto`; instead of the recipe's. On a CPU it must be
            given.
        policy: A policy or the name of one (`planned`, `keep`, `selective`, `recompute`,
            `recompute+offload`, `offload`, `compress`); instead of the recipe's.
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
            recipe=recipe,
            budget=budget,
            policy=policy,
            probe=probe,
            batch_shape=batch_shape,
            journal=journal,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._device: torch.device | None = None

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


def _refuse_several(argument: str, number: int, found: str) -> None:
    if number > 1:
        raise ValueError(
            f"RecomputeStrategy trains on one device, but the Trainer has {found}: expected "
            f"Trainer({argument}=1). On several take rematic.RecomputeDDPStrategy(...) "
            "(by name 'recompute_ddp'), or RecomputeFSDPStrategy ('recompute_fsdp') or "
            "RecomputeModelParallelStrategy ('recompute_fsdp2') for a sharded model."
        )

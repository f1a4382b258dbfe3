"""Strategies for `lightning.pytorch` that train with rematic on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.session import Session
from rematic.transaction import num_ranks


class RecomputeDDPStrategy(SessionStrategy, DDPStrategy):
    """Trains a whole copy of the model on each device, inside a memory budget per device.

    `Trainer(strategy=rematic.RecomputeDDPStrategy(budget="20GiB"), devices=4)`. Registered as
    `"recompute_ddp"` once `rematic.callbacks` is imported. Takes the arguments of
    `rematic.RecomputeStrategy` and those of Lightning's `DDPStrategy`, by keyword.
    """

    strategy_name = "recompute_ddp"


class RecomputeFSDPStrategy(SessionStrategy, FSDPStrategy):
    """Trains a model sharded by `FullyShardedDataParallel`, inside a memory budget per device.

    `Trainer(strategy=rematic.RecomputeFSDPStrategy(auto_wrap_policy={Block}), devices=4)`.
    Registered as `"recompute_fsdp"` once `rematic.callbacks` is imported. Takes the arguments of
    `rematic.RecomputeStrategy` and those of Lightning's `FSDPStrategy`, by keyword; its activation
    checkpointing is taken over.
    """

    strategy_name = "recompute_fsdp"

    def __init__(
        self,
        *args: Any,
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | None = None,
        activation_checkpointing_policy: Any = None,  # noqa: ANN401 - a private type of Lightning
        **kwargs: Any,
    ) -> None:
        if activation_checkpointing is not None or activation_checkpointing_policy is not None:
            rank_zero_warn(
                "RecomputeFSDPStrategy takes activation checkpointing over: its recipe decides "
                "what is recomputed. Remove `activation_checkpointing` and "
                "`activation_checkpointing_policy`."
            )
        super().__init__(*args, **kwargs)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # Before the wrapper changes the names; its parameters are others afterwards.
        self.attach_when_fitting()
        units = _units_of(self.session)
        wrapped = super()._setup_model(model)
        if self.is_fitting() and self.session is not None:
            from torch.distributed.fsdp import FullyShardedDataParallel

            self.session.read_parameters()
            _refuse_shards_inside(units, FullyShardedDataParallel, "auto_wrap_policy")
        return wrapped


class RecomputeModelParallelStrategy(SessionStrategy, ModelParallelStrategy):
    """Trains a model that `configure_model` shards by `fully_shard`, inside a budget per device.

    `Trainer(strategy=rematic.RecomputeModelParallelStrategy(budget="20GiB"), devices=4)`.
    Registered as `"recompute_fsdp2"` once `rematic.callbacks` is imported. Takes the arguments of
    `rematic.RecomputeStrategy` and those of Lightning's `ModelParallelStrategy`, by keyword.
    `auto` sizes put all devices into the data-parallel group. Units of a tensor-parallel model are
    recomputed on all ranks at once where the policy says so (`policy="recompute"`), and kept under
    `planned`, which decides for each rank.
    """

    strategy_name = "recompute_fsdp2"

    @override
    def setup_environment(self) -> None:
        """Makes the mesh."""
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        if self._data_parallel_size == "auto":
            num_devices = self.num_nodes * self.num_processes
            self._data_parallel_size = num_devices // self._tensor_parallel_size
        super().setup_environment()

    @override
    def attach_when_fitting(self) -> None:
        """Attaches the module, which `configure_model` has sharded by now."""
        super().attach_when_fitting()
        if self.is_fitting():
            from torch.distributed.fsdp import FSDPModule

            _refuse_shards_inside(_units_of(self.session), FSDPModule, "fully_shard")


def _units_of(session: Session | None) -> dict[str, nn.Module]:
    if session is None:
        return {}
    return {name: session.model.get_submodule(name) for name in session.unit_classes}


def _refuse_shards_inside(units: Mapping[str, nn.Module], kind: type[Any], argument: str) -> None:
    if num_ranks() == 1:
        return
    for name, unit in units.items():
        for inner, module in unit.named_modules():
            if inner and isinstance(module, kind):
                raise ValueError(
                    f"{name}.{inner} is sharded by itself inside the unit {name}: expected units "
                    "that are sharded as a whole or not at all, since a rank that recomputes one "
                    f"alone would wait for the others to gather it. Shard {name} by {argument}, "
                    "or name the units in the recipe's `policy.units`."
                )

"""Shards a model over the processes of a run, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rematic.activations import find_units


def shard_model(model: nn.Module, mesh: DeviceMesh, *, patterns: Sequence[str] = ()) -> None:
    """Shards the parameters of each unit together, and those around the units with the root.

    A unit that is recomputed gathers its own parameters then, once more.

    Args:
        model: The model with its adapter, on the CPU or on the device of this process.
        mesh: The processes.
        patterns: The recipe's `policy.units`.
    """
    from torch.distributed.fsdp import fully_shard

    for _, unit in find_units(model, patterns):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)

"""Collectives in the forward of a unit: a rank that replays them alone would wait for ever.

Tensor, sequence and expert parallelism have them, batch norms that are synchronised, and what is
sharded inside a unit. Such a unit is *joint*: what happens to it is the same on all ranks. It is
never evicted, planned or tried again on one rank, and replayed only where the policy itself, which
ranks agree on, has it replayed on all. Compiled units are not looked into.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.memory import autocast_of_call

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_log = logging.getLogger("rematic")
_CONSEQUENCE = (
    "it is recomputed where the policy names its action, on all ranks at once, and otherwise kept; "
    "it is never evicted, planned or run again on one rank alone"
)
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
_WAITS = frozenset({"wait_tensor", "monitored_barrier_"})


class _Watch(TorchDispatchMode):
    """Makes a unit joint when a collective begins under it."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch 2.13
        self._unit = unit
        self._parts_itself = _distributed_tensor()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, self._parts_itself) for kind in types):
            return NotImplemented  # its own dispatch comes down to ops on the parts, seen here
        if func.namespace in _NAMESPACES and func._opname not in _WAITS:
            _make_joint(self._unit, func._opname)
        with autocast_of_call(func):
            return func(*args, **(kwargs or {}))


def watching_collectives(unit: Unit) -> contextlib.AbstractContextManager[object]:
    """Watches a unit's forward for collectives, where there are several ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return contextlib.nullcontext()
    if distributed.get_world_size() == 1:
        return contextlib.nullcontext()
    return _Watch(unit)


def is_sharded_inside(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was applied to a part of a module."""
    from torch.distributed.fsdp import FSDPModule

    return any(part is not module and isinstance(part, FSDPModule) for part in module.modules())


def obstacle_to_selective(unit: Unit) -> str | None:
    """Returns why a unit cannot be replayed in part, None if it can."""
    if unit.is_compiled:
        return "it is compiled"
    if unit.graphless:
        return "its graph keeps what it does not save"
    if unit.joint is not None and is_sharded_inside(unit.module):
        return "a replay leaves out ops that gather what is sharded inside it"
    return None


def _is_wrapped_inside(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts = (part for part in module.modules() if part is not module)
    return any(isinstance(part, FullyShardedDataParallel) for part in parts)


def go_with_all_ranks(unit: Unit) -> None:
    """Leaves out of the plan of a joint unit what another rank may do in another way."""
    if unit.joint is None:
        return
    unit.unmeasured, unit.tiling = False, None
    if not unit.agreed:
        unit.starts_held, unit.selection, unit.stash = True, None, None


def _make_joint(unit: Unit, op: str) -> None:
    if unit.joint is not None:
        return
    unit.joint = f"its forward exchanges tensors with other ranks ({op})"
    go_with_all_ranks(unit)
    consequence = _CONSEQUENCE
    if _is_wrapped_inside(unit.module):
        unit.pinned = "FullyShardedDataParallel inside it frees parameters when a replay ends"
        consequence = f"it is kept under every policy, since {unit.pinned}. Wrap the whole unit"
    text = f"{unit.joint}: {consequence}"
    is_as_asked = unit.agreed and unit.pinned is None
    _log.log(logging.INFO if is_as_asked else logging.WARNING, "unit %r: %s", unit.name, text)
    unit.tell("joint", text)


def _distributed_tensor() -> type[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return DTensor

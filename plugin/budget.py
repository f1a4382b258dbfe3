"""Turns the budget of a recipe into bytes on the device at hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rematic.byte_sizes import format_bytes
from rematic.memory import MemorySnapshot
from rematic.recipes import Budget
from rematic.training_tensors import tensor_bytes

AUTO_SHARE = 0.95
"""Share of the device's capacity that `auto` means."""


def resolve_budget(budget: Budget, *, snapshot: MemorySnapshot, device: torch.device) -> int | None:
    """Returns the budget in bytes; None for `auto` on a CPU, or where no capacity is known.

    (Other programs use the memory of a CPU as well: nobody can say which share of it is free to
    take.)

    Raises:
        ValueError: If the budget is a share of a capacity that is not known.
    """
    if budget.kind == "absolute":
        return int(budget.value or 0)
    capacity = snapshot.capacity_bytes
    if budget.kind == "auto":
        return None if device.type == "cpu" or capacity is None else int(AUTO_SHARE * capacity)
    if capacity is None:
        raise ValueError(
            f"the budget is {budget}, a share of the device, but the capacity of {device} is not "
            "known: expected a size. Write for example `budget: 20GiB`."
        )
    return int(float(budget.value or 0) * capacity)


def refuse_too_small(budget_bytes: int, tensors: Iterable[torch.Tensor]) -> None:
    """Refuses a budget that the model's own weights and buffers do not fit into.

    Raises:
        ValueError: If they do not fit.
    """
    needed = sum(tensor_bytes(tensor) for tensor in tensors)
    if budget_bytes < needed:
        raise ValueError(
            f"the budget is {format_bytes(budget_bytes)} but the model's weights and buffers alone "
            f"take {format_bytes(needed)}: expected a budget that holds them, their gradients, the "
            "optimizer's state and the activations of one unit. Raise `memory.budget` or take a "
            "smaller model."
        )

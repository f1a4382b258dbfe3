"""The budget of a recipe in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rematic.budget import AUTO_SHARE, refuse_too_small, resolve_budget
from rematic.memory import MemorySnapshot
from rematic.recipes import parse_budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BUDGETS: dict[str, tuple[Any, int | None, torch.device, int | None]] = {
    "a size": ("2KiB", None, CPU, 2048),
    "a size beyond the device": ("2KiB", 1000, CUDA, 2048),
    "bytes": (5000, None, CPU, 5000),
    "a share": (0.5, 1001, CPU, 500),
    "auto on a device": ("auto", 1000, CUDA, int(1000 * AUTO_SHARE)),
    "auto where the capacity is unknown": ("auto", None, CUDA, None),
    "auto on a CPU": ("auto", 1000, CPU, None),
}


@pytest.mark.parametrize(
    ("budget", "capacity", "device", "expected"), BUDGETS.values(), ids=BUDGETS.keys()
)
def test_a_budget_becomes_bytes(
    budget: Any, capacity: int | None, device: torch.device, expected: int | None
) -> None:
    snapshot = MemorySnapshot(capacity_bytes=capacity)
    assert resolve_budget(parse_budget(budget), snapshot=snapshot, device=device) == expected


def test_a_share_of_an_unknown_capacity_is_refused() -> None:
    message = r"^the budget is 0\.9, a share of the device, but the capacity of cuda:0 is not known"
    with pytest.raises(ValueError, match=message):
        resolve_budget(parse_budget(0.9), snapshot=MemorySnapshot(), device=CUDA)


def test_a_budget_must_hold_the_weights() -> None:
    weights = [torch.zeros(100), torch.zeros(28, dtype=torch.float64)]
    refuse_too_small(624, weights)
    with pytest.raises(ValueError, match=r"^the budget is 623 B but .* alone take 624 B: expected"):
        refuse_too_small(623, weights)

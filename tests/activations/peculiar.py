"""Modules and steps that are out of the ordinary, each of them legal in plain PyTorch.

A case builds three blocks and drives them through a step; what it returns, the gradients, buffers
and the RNG state must not depend on what rematic does. It calls `evict` where an eviction hurts
most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 8
Tensors = Iterable[torch.Tensor]
Evict = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step with something peculiar in it."""

    name: str
    """The id of the parameter."""

    block: Callable[[], nn.Module]
    """Makes one block."""

    drive: Callable[[nn.ModuleList, Evict], Tensors]
    """Runs forward and backward, calls `evict` in between, returns what must be equal."""

    number: int = 3
    """How many blocks there are, all units; two at least."""

    replayed: bool = True
    """Whether a replay must happen when the records start evicted."""

    def __str__(self) -> str:
        return self.name


class Block(nn.Module):
    """The ordinary part of a peculiar block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.setup()

    def setup(self) -> None:
        """Makes what the subclass needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def some_input(*, requires_grad: bool = False, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, WIDTH, requires_grad=requires_grad)


def through(blocks: nn.ModuleList, x: Any, *args: Any, **kwargs: Any) -> Any:
    for block in blocks:
        x = block(x, *args, **kwargs)
    return x


def backward(loss: torch.Tensor, evict: Evict) -> torch.Tensor:
    evict()
    loss.backward()
    return loss


def chain(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    yield backward(through(blocks, some_input()).sum(), evict)

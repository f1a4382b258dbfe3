"""A stack of plain blocks for tests that look at one mechanism."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """Saves its input, the output of tanh, and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A stack of blocks and a head."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def make_model(make_block: Callable[[], nn.Module] = Block, depth: int = 3) -> Model:
    """Returns the model, always with the same weights."""
    torch.manual_seed(0)
    return Model(make_block, depth)


def make_input(batch: int = 4, *, requires_grad: bool = False) -> torch.Tensor:
    """Returns an input `(batch, WIDTH)`, always the same."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, WIDTH, generator=generator, requires_grad=requires_grad)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Returns copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

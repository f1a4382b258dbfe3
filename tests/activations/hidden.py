"""Blocks whose autograd functions keep tensors on their `ctx`, where no hook sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 64
HIDDEN = 4 * WIDTH


class _Stashing(torch.autograd.Function):
    """A product with a weight that keeps its input as an attribute, as LLM.int8 does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.stash = x.clone()
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        kept = ctx.stash.reshape(-1, ctx.stash.shape[-1]).to(flat.dtype)
        return gradient @ weight.to(gradient.dtype), (flat.t() @ kept).to(weight.dtype)


class StashingBlock(nn.Module):
    """A residual MLP over such products, with dropout and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 16)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(_Stashing.apply(self.norm(x), self.up))
        output = x + self.drop(_Stashing.apply(hidden, self.down))
        self.mean.lerp_(output.detach().mean((0, 1)), 0.1)
        return output


class StashingModel(nn.Module):
    """Three blocks between an embedding and a head.

    Args:
        tied: Whether the first and the last block share a weight.
        frozen: Whether the embedding and a weight of the first block are not trained.
        twice: Whether the first block is called again at the end.
    """

    def __init__(self, *, tied: bool = False, frozen: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList([StashingBlock() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight
        self.twice = twice
        if tied:
            self.blocks[2].up = self.blocks[0].up
        if frozen:
            self.embed.weight.requires_grad_(False)
            self.blocks[0].up.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in [*self.blocks, *([self.blocks[0]] if self.twice else [])]:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make(**options: bool) -> StashingModel:
    """Returns the model, always with the same weights."""
    torch.manual_seed(0)
    return StashingModel(**options)


def ids(seed: int = 0) -> torch.Tensor:
    """Returns tokens `(2, 32)`."""
    return torch.randint(0, 17, (2, 32), generator=torch.Generator().manual_seed(seed))

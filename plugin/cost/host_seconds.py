"""Measures what Python costs per unit: a replay, and a selective forward with its replay.

On a stack so small that its arithmetic is nothing beside it, with about as many ops per block as
language models have.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

from rematic.activations import Engine
from rematic.policy import Action, Keep, Plan, Recompute, Selective

WIDTH, HEADS, LENGTH, NUM_BLOCKS = 16, 2, 4, 4


def measure_host_seconds(*, repeats: int = 15) -> tuple[float, float]:
    """Returns seconds of the host per replayed and per selective unit, beyond a kept one.

    Args:
        repeats: Steps of each kind, taken in turns; the fastest counts.
    """
    model = nn.Sequential(*(_Block() for _ in range(NUM_BLOCKS)))
    inputs = torch.ones(1, LENGTH, WIDTH, requires_grad=True)
    engine = Engine(model)
    actions: tuple[Action, ...] = (Keep(), Recompute(), Selective())
    fastest = [float("inf")] * len(actions)
    try:
        for _ in range(repeats):
            for i, action in enumerate(actions):
                engine.apply(Plan(actions=(action,) * NUM_BLOCKS))
                started = time.thread_time()
                model(inputs).sum().backward()
                fastest[i] = min(fastest[i], time.thread_time() - started)
    finally:
        engine.detach()
    kept, replayed, selective = fastest
    return max(0.0, replayed - kept) / NUM_BLOCKS, max(0.0, selective - kept) / NUM_BLOCKS


class _Block(nn.Module):
    """Attention with rotated positions and a gated feed-forward part, norms written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )
        self.scale = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, seq, WIDTH)` to the same shape."""
        h = self._norm(x, 0)
        queries, keys = self._rotated(self.queries(h)), self._rotated(self.keys(h))
        attended = F.scaled_dot_product_attention(
            queries, keys, self._heads(self.values(h)), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self._norm(x, 1)
        fed: torch.Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + fed

    def _norm(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.scale[which] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        heads = self._heads(x)
        first, second = heads.chunk(2, dim=-1)
        return heads * 0.5 + torch.cat((-second, first), dim=-1) * 0.5

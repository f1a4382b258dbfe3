"""The model of the device check, a step of it, and the comparison of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batches are."""

    width: int
    layers: int
    length: int
    batch: int

    @classmethod
    def on(cls, device: torch.device) -> Size:
        """Returns a size that fills a GPU for milliseconds, or a CPU for as long."""
        if device.type == "cpu":
            return cls(width=64, layers=3, length=64, batch=2)
        return cls(width=1024, layers=8, length=2048, batch=2)


class Block(nn.Module):
    """Attention and an MLP with norms, residuals and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads = max(1, width // 64)
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, length, width)` to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), dropout)


class Stack(nn.Module):
    """A causal language model of such blocks."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size.width, dropout) for _ in range(size.layers))
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids `(batch, length)` to the loss of predicting each from those before it."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def make_model(
    device: torch.device,
    size: Size,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
) -> Stack:
    """Returns the model, always with the same weights."""
    torch.manual_seed(0)
    return Stack(size, dropout).to(device=device, dtype=dtype)


def make_ids(device: torch.device, size: Size, length: int | None = None) -> torch.Tensor:
    """Returns a batch, always the same."""
    generator = torch.Generator().manual_seed(5)
    shape = (size.batch, size.length if length is None else length)
    return torch.randint(0, VOCABULARY, shape, generator=generator).to(device)


def leftovers(model: nn.Module, losses: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies what steps leave behind: losses, gradients, weights, buffers, states of generators."""
    device = next(model.parameters()).device
    found = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        found[f"weight {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    found["generator of the host"] = torch.get_rng_state()
    if device.type == "cuda":
        found["generator of the device"] = torch.cuda.get_rng_state(device)
    return found


def deviations(
    found: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    plain_again: dict[str, torch.Tensor],
) -> list[str]:
    """Names everything that is not as the plain steps left it (contract 1).

    Where two plain steps agree bit for bit, so must this one; elsewhere it must lie within four
    times their distance.
    """
    if found.keys() != plain.keys():
        return sorted(found.keys() ^ plain.keys())
    return [name for name in plain if not _fits(found[name], plain[name], plain_again[name])]


def _fits(found: torch.Tensor, plain: torch.Tensor, again: torch.Tensor) -> bool:
    if _same_bits(plain, again):
        return _same_bits(found, plain)
    spread = (plain.double() - again.double()).abs().max()
    return bool((found.double() - plain.double()).abs().max() <= 4 * spread)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)

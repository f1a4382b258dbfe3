"""A small model with everything that a second attempt could get wrong, for tests of whole steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8


class Block(nn.Module):
    """Dropout, running statistics, a counter and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.batch_norm = nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.num_calls = 0
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, seq, WIDTH)` to the same shape."""
        self.num_calls += 1
        self.lengths.append(x.shape[1])
        h = self.batch_norm(self.up(self.norm(x)).transpose(1, 2)).transpose(1, 2)
        return x + F.dropout(self.down(F.gelu(F.dropout(h, 0.1))), 0.1)


class TiedModel(nn.Module):
    """Embedding, two blocks, a head that shares the embedding's weight, a weight without use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids `(batch, seq)` to a loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def make_tied_model() -> TiedModel:
    """Returns the model, always with the same weights."""
    torch.manual_seed(0)
    return TiedModel()


def make_batches(number: int = 3) -> list[torch.Tensor]:
    """Returns batches of ids `(3, 5)`, always the same."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 11, (3, 5), generator=generator) for _ in range(number)]


def everything(model: nn.Module, losses: Sequence[torch.Tensor]) -> dict[str, object]:
    """Returns all that must have the same bits, by name."""
    state: dict[str, object] = {f"loss {i}": _bits(loss) for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        state[f"weight {name}"] = _bits(parameter)
        state[f"gradient of {name}"] = None if parameter.grad is None else _bits(parameter.grad)
    state |= {f"buffer {name}": _bits(buffer) for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            state[f"counter {name}"] = (module.num_calls, list(module.lengths))
    state["generator"] = torch.get_rng_state().tolist()
    return state


def different(found: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """Names what differs."""
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if found[name] != value]


def _bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().contiguous().reshape(-1)
    values: list[int] = flat.view(torch.uint8).tolist()
    return values

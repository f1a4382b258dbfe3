"""Kernels of other packages: known by the name of their op, never kept when they draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rematic.activations import Engine
from rematic.activations.selective import is_random
from rematic.policy import DEFAULT_SAVED, OP_GROUPS, Plan, Recompute, Selective
from tests.activations.families import build_llama
from tests.activations.parity import Outcome, differences, read_outcome

WIDTH, HEADS = 16, 2


@pytest.fixture(scope="module")
def flash() -> Iterator[Any]:
    """An op with the name and the arguments that flash-attn registers, computed by torch."""
    if hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        pytest.skip("the real one is installed")
    library = torch.library.Library("flash_attn", "DEF")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, bool causal) -> "
        "(Tensor, Tensor)"
    )

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        seed = torch.rand(()) if dropout_p else torch.ones(())
        return output * seed, seed

    library.impl("_flash_attn_forward", forward, "CompositeExplicitAutograd")
    yield torch.ops.flash_attn._flash_attn_forward
    library._destroy()


class _Attention(torch.autograd.Function):
    """As flash-attn does: one op in forward, saved with its output, another one in backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, dropout_p: float) -> torch.Tensor:
        output, seed = torch.ops.flash_attn._flash_attn_forward(q, k, v, dropout_p, causal=True)
        ctx.save_for_backward(q, k, v, output, seed)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, _, seed = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            output = F.scaled_dot_product_attention(*inputs, is_causal=True) * seed
        return (*torch.autograd.grad(output, inputs, gradient), None)


class Block(nn.Module):
    """Attention by that op, then dropout, which draws after it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in split)
        mixed = _Attention.apply(q, k, v, self.dropout).transpose(1, 2).flatten(2)
        return x + F.dropout(torch.tanh(self.out(mixed)), 0.2)


def run(model: nn.Module) -> Outcome:
    torch.manual_seed(5)
    loss = model(torch.randn(2, 6, WIDTH)).square().sum()
    loss.backward()
    return read_outcome(model, [loss])


def make(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*[Block(dropout) for _ in range(2)]))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("save", [("attention",), DEFAULT_SAVED], ids=["attention", "default"])
@pytest.mark.usefixtures("flash")
def test_flash_attention_is_kept_unless_it_draws(save: tuple[str, ...], dropout: float) -> None:
    wanted = run(make(dropout))
    model = make(dropout)
    engine = Engine(model)
    engine.apply(Plan(actions=(Selective(save=save),) * 2))
    for _ in range(2):
        model.zero_grad()
        assert differences(run(model), wanted) == []
    model(torch.randn(2, 6, WIDTH))
    if save == ("attention",):
        output = model(torch.randn(2, 6, WIDTH))
        held = [record.own_bytes() for record in engine.ledger.records()]
        kept = 2 * 6 * WIDTH * 4 + 4  # the output of attention, and what stands for its seed
        assert held == [0 if dropout else kept] * 2
        del output
    engine.detach()


@pytest.mark.usefixtures("flash")
def test_dropout_is_read_where_it_was_given() -> None:
    op = torch.ops.flash_attn._flash_attn_forward.default
    x = torch.zeros(1)
    assert is_random(op, (x, x, x, 0.1, True))
    assert not is_random(op, (x, x, x, 0.0, True))
    assert is_random(op, (x, x, x), {"dropout_p": 0.1, "causal": True})
    assert not is_random(torch.ops.aten.mm.default, (x, x))
    assert is_random(torch.ops.aten.bernoulli.default, (x,))
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not is_random(sdpa, (x, x, x))
    assert is_random(sdpa, (x, x, x, 0.5))


def test_the_names_of_kernels_of_other_packages() -> None:
    names = OP_GROUPS["attention"]
    assert {"flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"} <= set(names)
    assert "torch_attn::_varlen_attn" in names


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("action", [Recompute(), Selective()], ids=lambda action: action.name)
def test_packed_sequences_of_different_lengths(action: Any, attention: str) -> None:
    """Several documents in one row: positions begin anew, and no document sees another."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    ids = torch.arange(9)[None] % 11

    def step(model: nn.Module) -> Outcome:
        torch.manual_seed(2)
        labels = ids.masked_fill(positions == 0, -100)
        loss = model(input_ids=ids, position_ids=positions, labels=labels).loss
        loss.backward()
        return read_outcome(model, [loss])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return build_llama(attention)

    wanted = step(build())
    model = build()
    engine = Engine(model)
    engine.apply(Plan(actions=(action,) * 3))
    for _ in range(2):
        model.zero_grad()
        assert differences(step(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 6
    engine.detach()


class VariableLength(nn.Module):
    """Attention over packed documents, told by their boundaries, as flash-attn's interface is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, *, cu_seqlens: torch.Tensor, max_length: int
    ) -> torch.Tensor:
        parts = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            assert end - start <= max_length
            q, k, v = self.qkv(x[start:end]).unflatten(-1, (3, HEADS, -1)).unbind(1)
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
            )
            parts.append(mixed.transpose(0, 1).flatten(1))
        return x + self.out(torch.cat(parts))


def test_boundaries_of_documents_are_arguments_like_others() -> None:
    def step(model: nn.ModuleList) -> list[torch.Tensor]:
        found = []
        for bounds in ([0, 3, 9], [0, 1, 5, 9]):
            x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
            for block in model:
                x = block(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_length=6)
            x.square().sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    def build() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([VariableLength() for _ in range(2)])

    wanted = step(build())
    for action in (Recompute(), Selective()):
        model = build()
        engine = Engine(nn.Sequential(model))
        engine.apply(Plan(actions=(action,) * 2))
        assert all(map(torch.equal, step(model), wanted))
        assert engine.ledger.counts.replays.total() == 4
        engine.detach()

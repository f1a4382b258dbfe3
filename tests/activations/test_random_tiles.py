"""`tile` over random modules: slices where they may be, whole where not, the same result always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import rematic
from rematic.policy import Policy, Tile

WIDTH = 8
Op = Callable[["Program", torch.Tensor, torch.Tensor], torch.Tensor]


def _in_place(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[..., 0] = b[..., 1] * 2
    return out.tanh_()


def _loss_of_its_own(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unit.auxiliary = a.square().mean()
    return a + b


def _length_of_its_own(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unit.length = a.shape[1]
    return a * b


TOKEN_WISE: dict[str, Op] = {
    "linear": lambda unit, a, b: unit.linear(a),
    "residual": lambda unit, a, b: a + b,
    "product": lambda unit, a, b: torch.tanh(a * b),
    "norm": lambda unit, a, b: unit.norm(a),
    "softmax": lambda unit, a, b: torch.softmax(a, -1),
    "in place": _in_place,
    "masked": lambda unit, a, b: a.masked_fill(b > 0, 0.5),
    "views": lambda unit, a, b: a.view(*a.shape[:2], 2, 4).transpose(2, 3).reshape(a.shape),
    "sorted": lambda unit, a, b: a.sort(-1).values + b,
    "sixteen bits": lambda unit, a, b: (a.bfloat16() * 2).float() + b,
    "strided": lambda unit, a, b: (a.transpose(0, 1) + 1).transpose(0, 1) * b,
}
OTHERS: dict[str, Op] = {
    "scan": lambda unit, a, b: a.cumsum(1).tanh(),
    "shift": lambda unit, a, b: a + b.roll(1, 1),
    "mean": lambda unit, a, b: a - b.mean(1, keepdim=True),
    "far away": lambda unit, a, b: a + b[:, :1],
    "attention": lambda unit, a, b: F.scaled_dot_product_attention(a, b, b),
    "dropout": lambda unit, a, b: F.dropout(a, 0.3, unit.training),
    "sudden dropout": lambda unit, a, b: F.dropout(a, 0.3, unit.training and unit.calls[0] > 2),
    "hidden scan": lambda unit, a, b: a + unit.gate * b.cumsum(1),
    "batch": lambda unit, a, b: unit.batch_norm(a.transpose(1, 2)).transpose(1, 2),
    "loss of its own": _loss_of_its_own,
    "length of its own": _length_of_its_own,
    "positions": lambda unit, a, b: a + torch.arange(a.shape[1])[:, None].tanh(),
}
OPS = TOKEN_WISE | OTHERS


class Program(nn.Module):
    """A unit that applies a list of ops, each to the latest value and to an older one."""

    def __init__(self, ops: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.ops = tuple(ops)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))
        self.calls = [0]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
        values = [x if mask is None else x * mask[..., None]]
        for name, index in self.ops:
            values.append(OPS[name](self, values[-1], values[index % len(values)]))
        return values[-1], {"middle": values[len(values) // 2] * 2, "none": None}


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int]]:
    """At most one op that forbids slices, so that it alone has to be found."""
    ops = draw(st.lists(st.sampled_from(sorted(TOKEN_WISE)), min_size=1, max_size=5))
    if draw(st.booleans()):
        ops.insert(draw(st.integers(0, len(ops))), draw(st.sampled_from(sorted(OTHERS))))
    return [(name, draw(st.integers(0, 9))) for name in ops]


def run(unit: Program, batches: Sequence[tuple[int, int, int, str]]) -> list[Any]:
    """Trains a few steps; returns outputs, gradients and the state of the generator of each."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(unit.parameters(), 0.05)
    found = []
    for size, length, seed, padding in batches:
        unit.calls[0] += 1
        x = torch.randn(size, length, WIDTH, generator=torch.Generator().manual_seed(seed))
        x.requires_grad_()
        mask = None if padding == "none" else torch.ones(size, length)
        if mask is not None:
            mask[:, slice(length // 2) if padding == "left" else slice(length // 2, None)] = 0
        output, more = unit(x, mask)
        loss = output.square().sum() + more["middle"].sin().sum()
        loss = loss + getattr(unit, "auxiliary", 0.0)
        loss.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in unit.parameters()]
        found.append((output.detach(), x.grad, *gradients, torch.get_rng_state()))
        found.append([int(unit.batch_norm.num_batches_tracked), getattr(unit, "length", 0)])
        optimizer.step()
        optimizer.zero_grad()
    return found


def close(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return bool(found == wanted)
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    scale = 1 + float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 1.0
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


@settings(max_examples=40)
@given(
    ops=programs(),
    num_tiles=st.integers(2, 5),
    batches=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 19),
            st.integers(0, 9),
            st.sampled_from(["none", "left", "right"]),
        ),
        min_size=2,
        max_size=5,
    ),
)
def test_random_units_in_slices_give_what_the_whole_gives(
    ops: list[tuple[str, int]], num_tiles: int, batches: list[tuple[int, int, int, str]]
) -> None:
    if "batch" in dict(ops) or "attention" in dict(ops):  # which need more than nothing
        batches = [(max(size, 2), length, seed, kind) for size, length, seed, kind in batches]
    torch.manual_seed(0)
    wanted = run(Program(ops), batches)
    torch.manual_seed(0)
    unit = Program(ops)
    model = nn.Sequential(unit)
    policy = Policy(name="mine", default=Tile(num_tiles=num_tiles))
    session = rematic.attach(model, recipe={"policy": {"units": ["0"]}}, policy=policy)
    found = run(unit, batches)
    session.detach()
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(map(close, mine, theirs)), (ops, batches)

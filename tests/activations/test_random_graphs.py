"""Contract 1 over random modules: hypothesis writes the units' programs, plans and evictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rematic.policy import (
    Action,
    Keep,
    Offload,
    Plan,
    Recompute,
    RecomputeOffload,
    Selective,
)
from tests.activations.blocks import WIDTH, make_input
from tests.activations.parity import Outcome, attached, differences, read_outcome

Op = Callable[["Program", torch.Tensor, torch.Tensor], torch.Tensor]


def _in_place(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[:, 0] = b[:, 1] * 2
    return out.tanh_()


def _statistics(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unit.average = unit.average * 0.9 + a.detach().mean(0) * 0.1
    return a - unit.average


OPS: dict[str, Op] = {
    "linear": lambda unit, a, b: unit.linear(a),
    "residual": lambda unit, a, b: a + b,
    "product": lambda unit, a, b: torch.tanh(a * b),
    "dropout": lambda unit, a, b: F.dropout(a, 0.3, unit.training),
    "noise": lambda unit, a, b: a * (torch.rand_like(a) > 0.5),
    "relu in place": lambda unit, a, b: torch.relu_(a.clone()),
    "slices in place": _in_place,
    "norm": lambda unit, a, b: unit.norm(a),
    "running statistics": lambda unit, a, b: unit.batch_norm(a),
    "own statistics": _statistics,
    "views": lambda unit, a, b: a.view(-1, 2, 4).transpose(1, 2).reshape(a.shape),
    "attention": lambda unit, a, b: torch.softmax(a @ b.t(), -1) @ a,
    "halves": lambda unit, a, b: torch.cat([a[:, :4], b[:, 4:]], 1),
    "detached": lambda unit, a, b: (a.detach() * unit.scale).sigmoid(),
    "branch": lambda unit, a, b: torch.where(a > 0, a, b * 0.1),
    "parameter and buffer": lambda unit, a, b: a + unit.scale * unit.average,
}


class Program(nn.Module):
    """A unit that applies a list of ops, each to the latest value and to an older one."""

    def __init__(self, ops: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.ops = tuple(ops)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls = 0

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None, *, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        values = [x] if other is None else [x, other]
        for name, index in self.ops:
            values.append(OPS[name](self, values[-1], values[index % len(values)]))
        return torch.tanh(values[-1] * self.scale) * options["gain"], values[len(values) // 2]


class Graph(nn.Module):
    """Three units that hand on two tensors; the second unit is called twice."""

    def __init__(self, programs: Sequence[Sequence[tuple[str, int]]]) -> None:
        super().__init__()
        self.units = nn.ModuleList([Program(ops) for ops in programs])
        self.register_buffer("calls", torch.zeros(len(programs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other: torch.Tensor | None = None
        for unit in (*self.units, self.units[1]):
            x, other = unit(x, other, options={"gain": 1.5})
        assert other is not None
        return x.sum() + other.pow(2).mean()


def run(graph: Graph, *, leaf_input: bool, before_backward: Callable[[], object]) -> Outcome:
    """Accumulates two steps; the units' own counts of calls are part of the outcome."""
    torch.manual_seed(1)
    losses = []
    for step in range(2):
        loss = graph(make_input(requires_grad=leaf_input and step == 1))
        before_backward()
        loss.backward()
        losses.append(loss)
    graph.calls = torch.tensor([float(unit.calls) for unit in graph.units])
    return read_outcome(graph, losses)


def make(programs: Sequence[Sequence[tuple[str, int]]]) -> Graph:
    """Returns the graph, always with the same weights."""
    torch.manual_seed(0)
    return Graph(programs)


ACTIONS: tuple[Action, ...] = (
    *(Keep(), Recompute(), Selective(), Selective(save=("add", "mul", "matmul[1]"))),
    *(Offload(), RecomputeOffload()),
)
program = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(
    programs=st.lists(program, min_size=3, max_size=3),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=3),
    evicted=st.integers(0, 2000),
    leaf_input=st.booleans(),
)
def test_random_units_have_the_bits_of_the_plain_ones(
    programs: list[list[tuple[str, int]]], actions: list[Action], evicted: int, leaf_input: bool
) -> None:
    plain = run(make(programs), leaf_input=leaf_input, before_backward=lambda: None)
    graph = make(programs)
    with attached(graph) as engine:
        engine.apply(Plan(actions=tuple(actions)))
        found = run(
            graph,
            leaf_input=leaf_input,
            before_backward=lambda: engine.ledger.evict(evicted),
        )
    assert differences(found, plain) == []

"""Contract 1 over random modules: hypothesis writes the units' programs, plans and evictions.

Tensors of every size are moved, and `compress` by a stash that loses nothing, so that bits tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import rematic
from rematic.policy import (
    Action,
    Compress,
    Keep,
    Offload,
    Plan,
    Recompute,
    RecomputeOffload,
    Selective,
)
from rematic.stash import DiskStash
from rematic.stash.handle import StoredTensor
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


def _autocast(unit: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return unit.linear(a).float() + b


class Subclass(torch.Tensor):
    """A tensor of another type, which no stash takes."""


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
    "shared module": lambda unit, a, b: torch.tanh(unit.shared(a)),
    "integers": lambda unit, a, b: torch.gather(a, 1, b.argsort(1)) * unit.scale,
    "truth values": lambda unit, a, b: a.masked_fill(b > 0, 0.5) * b,
    "no dimensions": lambda unit, a, b: a * torch.sigmoid(b.mean()),
    "no elements": lambda unit, a, b: torch.cat([a.exp(), b[:0].sin()]).log1p(),
    "transposed": lambda unit, a, b: (a.t() * b.t()).sigmoid().t(),
    "expanded": lambda unit, a, b: (a * b[:1].expand_as(a)).tanh(),
    "every other": lambda unit, a, b: a + (b[:, ::2].sin() @ unit.linear.weight[::2, :]),
    "sixteen bits": lambda unit, a, b: (a.bfloat16() * b.bfloat16()).sigmoid().float(),
    "autocast": _autocast,
    "subclass": lambda unit, a, b: (a.as_subclass(Subclass) * b).tanh().as_subclass(torch.Tensor),
    "list of pieces": lambda unit, a, b: torch.stack([p.exp() for p in a.unbind(0)]) - b,
}


class Program(nn.Module):
    """A unit that applies a list of ops, each to the latest value and to an older one."""

    def __init__(self, ops: Sequence[tuple[str, int]], shared: nn.Module) -> None:
        super().__init__()
        self.ops = tuple(ops)
        self.shared = shared
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
            if not rematic.replaying():
                options["after_op"]()
        return torch.tanh(values[-1] * self.scale) * options["gain"], values[len(values) // 2]


class Graph(nn.Module):
    """Three units that hand on two tensors; the second unit is called twice."""

    def __init__(self, programs: Sequence[Sequence[tuple[str, int]]]) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([Program(ops, shared) for ops in programs])
        self.register_buffer("calls", torch.zeros(len(programs)))

    def forward(self, x: torch.Tensor, after_op: Callable[[], object]) -> torch.Tensor:
        other: torch.Tensor | None = None
        for unit in (*self.units, self.units[1]):
            x, other = unit(x, other, options={"gain": 1.5, "after_op": after_op})
        assert other is not None
        return x.sum() + other.pow(2).mean()


class Fails(Exception):
    """Raised in the middle of a forward."""


class Clock:
    """Counts the ops of forwards, and does something after one of them.

    Args:
        fails_at: The op of the first step after which it raises, beyond the last for none.
        evicts_at: The op of each step after which `evict` is called.
        evict: Lets go of records.
    """

    def __init__(self, fails_at: int, evicts_at: int, evict: Callable[[], object]) -> None:
        self.fails_at, self.evicts_at, self.evict = fails_at, evicts_at, evict
        self.num_ops = 0

    def begin(self) -> None:
        self.num_ops = 0

    def __call__(self) -> None:
        self.num_ops += 1
        if self.num_ops == self.evicts_at:
            self.evict()
        if self.num_ops == self.fails_at:
            self.fails_at = -1
            raise Fails


def run(graph: Graph, clock: Clock, *, leaf_input: bool) -> Outcome:
    """Accumulates three steps, of which the first may fail.

    The units' own counts of calls are part of the outcome.
    """
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        clock.begin()
        try:
            loss = graph(make_input(requires_grad=leaf_input and step == 1), clock)
        except Fails:
            continue
        clock.evict()
        loss.backward()
        losses.append(loss)
    graph.calls = torch.tensor([float(unit.calls) for unit in graph.units])
    return read_outcome(graph, losses)


def make(programs: Sequence[Sequence[tuple[str, int]]]) -> Graph:
    """Returns the graph, always with the same weights."""
    torch.manual_seed(0)
    return Graph(programs)


class ExactStash(DiskStash):
    """Stands for `compress`, whose losses no test of bits could tell from faults."""

    def put(
        self, tensors: Sequence[torch.Tensor], *, measured: bool = True
    ) -> list[StoredTensor | None]:
        return super().put(tensors)


ACTIONS: tuple[Action, ...] = (
    *(Keep(), Recompute(), Selective(), Selective(save=("add", "mul", "matmul[1]"))),
    *(Offload(), RecomputeOffload(), Compress()),
)
program = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9)), min_size=1, max_size=8
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=80)
@given(
    programs=st.lists(program, min_size=3, max_size=3),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=3),
    evicted=st.integers(0, 2000),
    leaf_input=st.booleans(),
    fails_at=st.integers(1, 40),
    evicts_at=st.integers(1, 20),
)
def test_random_units_have_the_bits_of_the_plain_ones(
    programs: list[list[tuple[str, int]]],
    actions: list[Action],
    evicted: int,
    leaf_input: bool,
    fails_at: int,
    evicts_at: int,
    scratch: Path,
) -> None:
    clock = Clock(fails_at, evicts_at, lambda: None)
    plain = run(make(programs), clock, leaf_input=leaf_input)
    graph = make(programs)
    with attached(graph) as engine:
        engine._places._offload = DiskStash(scratch, min_bytes=0)
        engine._places._compress = ExactStash(scratch, min_bytes=0)  # type: ignore[assignment]
        engine.apply(Plan(actions=tuple(actions)))
        clock = Clock(fails_at, evicts_at, lambda: engine.ledger.evict(evicted))
        found = run(graph, clock, leaf_input=leaf_input)
    assert differences(found, plain) == []

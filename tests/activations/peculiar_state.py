"""Randomness, counters, statistics, in-place changes (D1 to D3, C1, H3)."""

from __future__ import annotations

import collections
import random
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import rematic
from tests.activations.peculiar import (
    WIDTH,
    Block,
    Case,
    Evict,
    Tensors,
    backward,
    chain,
    some_input,
    through,
)

# --- in place ------------------------------------------------------------------------------------


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.relu_()
        h = h.clone()
        h[:, :2].mul_(2)
        h.add_(1)
        return self.down(h).sigmoid_()


def _consumed_in_place(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    for block in blocks:
        x = block(x).add_(1)  # nobody saved the output of the last linear
    yield backward(x.pow(2).sum(), evict)


class MutatesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x.clone())))
        x.add_(out.detach())
        return out


def _mutates_its_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    total = torch.zeros(())
    x = some_input()
    for block in blocks:
        total = total + block(x).sum()
    yield backward(total, evict)
    yield x


# --- randomness and state (D1 to D3) -------------------------------------------------------------


class Drops(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5, self.training)
        return super().forward(x) + torch.rand_like(x) * x


class OwnGenerator(Block):
    def setup(self) -> None:
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.noise)


def _own_generator(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for _ in range(2):
        yield from chain(blocks, evict)
    for block in blocks:
        yield block.noise.get_state()


class DrawsOutsideTorch(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (random.random() + float(np.random.rand())))


def _draws_outside_torch(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    random.seed(0)
    np.random.seed(0)
    for _ in range(3):
        yield from chain(blocks, evict)
    yield torch.tensor([random.random(), float(np.random.rand())])


class GivenGenerator(Block):
    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * torch.rand(x.shape, generator=generator)


def _given_generator(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    yield backward(through(blocks, some_input(), generator=generator).sum(), evict)
    yield generator.get_state()


class Counts(Block):
    """Every way in which modules keep count of what they saw (D3)."""

    def setup(self) -> None:
        self.calls = 0
        self.load: torch.Tensor | None = None
        self.total = torch.zeros(())
        self.seen: list[tuple[int, ...]] = []
        self.by_size: collections.Counter[int] = collections.Counter()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("latest", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        size = x.detach().abs().sum()
        self.load = size if self.load is None else self.load + size
        self.total += size
        self.seen.append(tuple(x.shape))
        self.by_size[len(x)] += 1
        self.average.data.mul_(0.9).add_(x.detach().mean(0))
        self.latest = x.detach().mean(0)
        return super().forward(x) * self.calls + self.load + self.average + len(self.seen)


def _counts(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for batch in (4, 3):
        yield backward(through(blocks, some_input(batch=batch)).sum(), evict)
    for block in blocks:
        yield torch.tensor([block.calls, len(block.seen), block.by_size[4], block.by_size[3]])
        yield from (block.load, block.total)


class Tally:
    def __init__(self) -> None:
        self.calls = 0


class CountsElsewhere(Block):
    """Keeps count in what its attributes hold."""

    def setup(self) -> None:
        self.tally = Tally()
        self.seen: dict[str, list[int]] = {"sizes": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally.calls += 1
        self.seen["sizes"].append(len(x))
        return super().forward(x) * self.tally.calls * len(self.seen["sizes"])


def _counts_elsewhere(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for _ in range(3):
        yield from chain(blocks, evict)
    for block in blocks:
        yield torch.tensor([block.tally.calls, len(block.seen["sizes"])])


class Remembers(Block):
    """A recurrence: its state is an attribute that has a graph."""

    def setup(self) -> None:
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = torch.tanh(self.up(x) + before)
        return x + self.down(self.state) * self.state


def _remembers(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    for _ in range(3):
        x = through(blocks, x)
    yield backward(x.sum(), evict)


class Carry(NamedTuple):
    """What a recurrence takes along."""

    hidden: torch.Tensor
    scales: tuple[list[torch.Tensor], float]


class RemembersInTuples(Block):
    """A recurrence from batch to batch: its state is a tuple that each call replaces."""

    def setup(self) -> None:
        self.state: tuple[torch.Tensor, ...] | None = None
        self.carry: Carry | None = None
        self.dtypes = (torch.float32, torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        if self.state is not None and self.carry is not None:
            (scale,), factor = self.carry.scales
            h = h * self.state[0] + self.carry.hidden * scale * factor
        self.state = (h.detach().mean(0), h.detach())
        self.carry = Carry(h.detach().exp(), ([h.detach().sum()], float(h.detach().sum())))
        self.dtypes = self.dtypes[::-1]
        return x + self.down(h) * torch.ones((), dtype=self.dtypes[0]).to(x.dtype)


def _remembers_in_tuples(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for _ in range(4):
        yield from chain(blocks, evict)
        yield from (block.state[0] for block in blocks)
        yield from (block.carry.hidden for block in blocks)
        yield torch.tensor([block.dtypes[0] is torch.float64 for block in blocks])


def _exchanged(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = through(blocks, some_input()).sum()
    old = [block.up for block in blocks]
    for block in blocks:
        block.up = nn.Linear(WIDTH, WIDTH)
    yield backward(loss, evict)
    yield from (linear.weight.grad for linear in old)


class Grows(Block):
    """Attends over everything it has seen so far (C1)."""

    def setup(self) -> None:
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past.append(self.up(x))
        past = torch.stack(self.past)
        return x + (torch.softmax(past @ x.T, 0).mean((0, 2))[:, None] * self.down(x))


def _grows(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = through(blocks, some_input())
    yield backward(through(blocks, x).sum(), evict)


class ManyChannels(Block):
    """Running statistics of more bytes than are cloned at every call."""

    def setup(self) -> None:
        self.up = nn.Linear(WIDTH, 20_000)
        self.norm = nn.BatchNorm1d(20_000)
        self.down = nn.Linear(20_000, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def _trains_after_evaluation(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks.eval()
    yield from chain(blocks, evict)
    blocks.train()
    yield from chain(blocks, evict)


def _evaluates_before_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = through(blocks, some_input()).sum()
    blocks.eval()  # H3
    yield backward(loss, evict)


class ReportsReplays(Block):
    outside: ClassVar[collections.Counter[bool]] = collections.Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not rematic.replaying():
            ReportsReplays.outside[self.training] += 1
        return super().forward(x)


def _reports_replays(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    ReportsReplays.outside.clear()
    yield from chain(blocks, evict)
    yield torch.tensor(ReportsReplays.outside[True])
    assert not rematic.replaying()


CASES = (
    Case(name="in place", block=InPlace, drive=chain),
    Case(name="output consumed in place", block=Block, drive=_consumed_in_place),
    Case(name="mutates its input", block=MutatesItsInput, drive=_mutates_its_input, replayed=False),
    Case(name="dropout", block=Drops, drive=chain),
    Case(name="generator of its own", block=OwnGenerator, drive=_own_generator),
    Case(name="generators outside torch", block=DrawsOutsideTorch, drive=_draws_outside_torch),
    Case(name="generator as argument", block=GivenGenerator, drive=_given_generator),
    Case(name="counters", block=Counts, drive=_counts),
    Case(name="counters inside others", block=CountsElsewhere, drive=_counts_elsewhere),
    Case(name="recurrence in tuples", block=RemembersInTuples, drive=_remembers_in_tuples),
    Case(name="recurrence", block=Remembers, drive=_remembers),
    Case(name="modules exchanged before backward", block=Block, drive=_exchanged),
    Case(name="list that grows", block=Grows, drive=_grows),
    Case(name="large statistics", block=ManyChannels, drive=chain, number=2),
    Case(
        name="training after evaluation",
        block=ManyChannels,
        drive=_trains_after_evaluation,
        number=2,
    ),
    Case(name="eval before backward", block=Drops, drive=_evaluates_before_backward),
    Case(name="asks whether it is replayed", block=ReportsReplays, drive=_reports_replays),
)
"""Every step of this kind."""

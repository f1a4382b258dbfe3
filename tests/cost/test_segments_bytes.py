"""Segments of units that are recomputed together: planned bytes and operations against real steps.

The steps are those of `torch.utils.checkpoint` around segments of a stack.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rematic.cost import TraceSettings, trace_profile
from rematic.memory import SimulatedProbe
from rematic.planner import Pace, StepCosts, peak_of, problem_of, seconds_of
from rematic.planner.schedules import every_unit, in_segments, sqrt_segments

WIDTH, LENGTH, NUM_BLOCKS = 32, 64, 6
FLOPS = Pace(
    op_seconds=lambda op: float(op.flops),
    replay_seconds=0.0,
    selective_seconds=0.0,
    moved_bytes_per_second=1.0,
)
"""Counts operations instead of seconds."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, segments: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.segments = segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.segments is None:
            for block in self.blocks:
                x = block(x)
            return x.square().sum()
        start = 0
        for length in self.segments:
            x = checkpoint(
                nn.Sequential(*self.blocks[start : start + length]), x, use_reentrant=False
            )
            start += length
        return x.square().sum()


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    settings = TraceSettings(
        loss=lambda model, batch: model(batch["x"]),
        make_batch=lambda batch, length, padded: {"x": torch.ones(batch, length, WIDTH)},
        batch=1,
        padded=(False,),
        on_accelerator=False,
    )
    return trace_profile(Stack(), settings).costs_at(batch=1, length=LENGTH)


def real_step(segments: tuple[int, ...] | None) -> tuple[int, int]:
    """Returns the highest live bytes of a plain step, weights included, and its operations."""
    model, x = Stack(segments), torch.ones(1, LENGTH, WIDTH)
    with SimulatedProbe() as probe:
        probe.track([*model.parameters(), x])
        model(x).backward()
    peak = probe.snapshot().peak_allocated_bytes
    assert peak is not None
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    return peak, counter.get_total_flops()


def test_everything_kept(costs: StepCosts) -> None:
    problem = problem_of(costs, FLOPS, allowed=("keep",))
    assert peak_of(problem, every_unit(problem, "keep")).total == real_step(None)[0]


@pytest.mark.parametrize("segments", [(2, 2, 2), (1,) * NUM_BLOCKS, (3, 3)], ids=str)
def test_segments(costs: StepCosts, segments: tuple[int, ...]) -> None:
    assert sqrt_segments(NUM_BLOCKS) == (2, 2, 2)
    peak, flops = real_step(segments)
    problem = in_segments(problem_of(costs, FLOPS, allowed=("keep", "recompute")), segments)
    assignment = (0,) * len(segments)
    assert seconds_of(problem, assignment) == flops - real_step(None)[1]
    assert peak_of(problem, assignment).total == peak

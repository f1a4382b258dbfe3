"""A training loop of Accelerate that notes all that a user could see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import rematic
from rematic.memory import SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe

WIDTH = 16
STEP_ALONE = Recipe(policy=PolicyConfig(op_retry="never", trust=("*",)))
"""Leaves every failure to the retry of the step."""


class Faults:
    """The moments, counted through retries too, at which memory runs out."""

    def __init__(self, **at: set[int]) -> None:
        self.at = at
        self.passed: dict[str, int] = {}
        self.num_fired = 0

    def point(self, where: str) -> None:
        self.passed[where] = self.passed.get(where, 0) + 1
        if self.passed[where] in self.at.get(where, ()):
            self.num_fired += 1
            raise torch.OutOfMemoryError("injected")


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faults: Faults) -> Tensor:
        ctx.faults = faults
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.faults.point("backward")
        return gradient, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    """Four blocks, and a head; runs out of memory where it is told to."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.faults = lambda: faults  # out of reach of what a second attempt puts back

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2:
                self.faults().point("forward")
            x = block(x)
            if i == 1:
                x = _Point.apply(x, self.faults())
        return self.head(x)


@dataclass
class Trained:
    """What a loop leaves."""

    model: nn.Module
    faults: Faults
    losses: list[float] = field(default_factory=list)
    synced: list[tuple[int, bool]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def is_same_as(self, other: Trained) -> None:
        """Asserts that two loops agree to the bit."""
        assert self.losses == other.losses
        assert self.synced == other.synced
        assert self.rates == other.rates
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        assert list(mine) == list(theirs)
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def fresh_accelerator(**options: Any) -> Accelerator:
    """Makes an Accelerator that shares nothing with those before it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def plugin_for(**fields: Any) -> rematic.RecomputePlugin:
    """Makes a plugin whose budget is never near."""
    given = {"budget": "1GiB", "probe": SimulatedProbe(), "recipe": STEP_ALONE, **fields}
    return rematic.RecomputePlugin(**given)


def train(
    plugin: rematic.RecomputePlugin | None = None,
    *,
    faults: Faults | None = None,
    accumulate: int = 1,
    precision: str = "no",
    inside: bool = False,
    num_batches: int = 20,
    accelerator: Accelerator | None = None,
    after_step: Callable[[Accelerator, int], None] | None = None,
) -> Trained:
    """Trains with clipping, a schedule and accumulation.

    Args:
        plugin: The plugin, None for the plain loop.
        faults: Where memory runs out.
        accumulate: Micro-batches of an optimizer step.
        precision: As Accelerate's.
        inside: Whether `accumulate` is entered inside the decorated step, not around it.
        num_batches: Micro-batches.
        accelerator: The Accelerator, None for a fresh one.
        after_step: Called with it and the number of the micro-batch after each.
    """
    accelerator = accelerator or fresh_accelerator(
        gradient_accumulation_steps=accumulate, mixed_precision=precision
    )
    torch.manual_seed(3)
    trained = Trained(model=nn.Module(), faults=faults or Faults())
    raw = Net(trained.faults)
    adam = torch.optim.AdamW(raw.parameters(), 1e-2)
    rates = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.9)
    if plugin is not None:
        plugin.attach(accelerator)
    model, optimizer, scheduler = accelerator.prepare(raw, adam, rates)
    trained.model = raw

    def forward_backward(batch: dict[str, Tensor]) -> Tensor:
        def run() -> Tensor:
            loss = (model(batch.pop("x")) - batch.pop("y")).square().mean()
            trained.faults.point("loss")
            accelerator.backward(loss)
            return loss.detach()

        if not inside:
            return run()
        with accelerator.accumulate(model):
            return run()

    step = forward_backward if plugin is None else plugin.step(forward_backward)
    generator = torch.Generator().manual_seed(5)
    for number in range(num_batches):
        x = torch.randn(8, WIDTH, generator=generator)
        batch = {"x": x, "y": x[:, :1].sin()}
        if inside:
            loss = step(batch)
        else:
            with accelerator.accumulate(model):
                loss = step(batch)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trained.losses.append(loss.item())
        trained.synced.append((accelerator.step, accelerator.sync_gradients))
        trained.rates.append(scheduler.get_last_lr()[0])
        if after_step is not None:
            after_step(accelerator, number)
    return trained


def state_folder(tmp_path: Path) -> str:
    """Returns a folder for `save_state`."""
    return str(tmp_path / "state")

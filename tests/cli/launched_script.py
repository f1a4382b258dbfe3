"""A training script for the launchers: one step on each rank, and what came of it as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rematic import RecomputePlugin


class Calls:
    """Slots: what objects hold in their `__dict__` a replay puts back."""

    __slots__ = ("number",)


CALLS = Calls()


class Block(nn.Module):
    """Counts the forwards of all blocks, replays too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        CALLS.number += 1
        return x + self.dropout(self.linear(x).tanh())


def main() -> None:
    """Trains two micro-batches."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plugin = RecomputePlugin.from_config()
    accelerator = Accelerator(cpu=True)
    plugin.attach(accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    @plugin.step
    def step(x: Tensor) -> float:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        return loss.item()

    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(2):
        CALLS.number = 0
        losses.append(step(torch.randn(4, 8)))
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "argv": sys.argv[2:],
        "forwards": CALLS.number,
        "policy": None if plugin.session is None else plugin.session.policy.name,
        "processes": accelerator.num_processes,
        "weights": sum(p.double().sum().item() for p in model.parameters()),
        "losses": losses,
    }
    Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

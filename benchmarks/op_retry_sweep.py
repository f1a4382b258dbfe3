"""Fails an allocation at every op of a small training step and compares with the plain step.

The way SQLite tests out-of-memory: for every n, the n-th op of forward, loss, backward or optimizer
step fails once, and two steps later losses, gradients, weights, buffers, optimizer state and
generators must be those of steps in which nothing failed.

    .venv/bin/python benchmarks/op_retry_sweep.py --json

Minutes on one core; the tests run a slice of it (tests/activations/test_op_retry.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rematic.activations import Engine, OpRetry
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Plan, Recompute

WIDTH = 8
NUM_STEPS = 2  # an optimizer's first step makes its state, the second one finds it
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw-amsgrad": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd-nesterov-loop": functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False
    ),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, foreach=True),
}
FAILURES = ("before an op", "after an allocation")
"""Before the op runs; or after it ran, its output dropped, as kernels that allocate late do."""


class Block(nn.Module):
    """Norm, attention with dropout, running statistics, dropout, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, seq, WIDTH)` to the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        h = self.batch_norm(h.transpose(1, 2).reshape(batch * length, WIDTH)).view(x.shape)
        return x + F.dropout(F.gelu(self.out(h)), 0.1)


class Tiny(nn.Module):
    """Embedding, two blocks, a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids `(batch, seq)` to a loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Where memory runs out, once at each position."""

    step: int
    """Which of the steps."""

    kind: str
    """One of `FAILURES`."""

    positions: tuple[int, ...]
    """Numbers of the ops, or of the allocations, from 1."""

    def probe(self, step: int) -> SimulatedProbe:
        """Returns the memory for a step."""
        if step != self.step:
            return SimulatedProbe()
        if self.kind == "before an op":
            return SimulatedProbe(fail_at_ops=self.positions)
        return SimulatedProbe(fail_at_allocations=self.positions)


NONE = Failures(step=-1, kind=FAILURES[0], positions=())


@dataclass(frozen=True, kw_only=True)
class Run:
    """What some steps left behind."""

    values: dict[str, torch.Tensor]
    """Everything that must have the same bits, by name."""

    sizes: tuple[tuple[int, int], ...]
    """(ops, allocations) of each step."""

    num_retries: int
    """Ops that were run again."""

    def wrong(self, wanted: Run) -> list[str]:
        """Names what differs from another run by a single bit."""
        assert self.values.keys() == wanted.values.keys()
        return [name for name, value in self.values.items() if _differ(value, wanted.values[name])]


def run_plain(optimizer: str) -> Run:
    """Runs the steps with nothing attached and no mode around them."""
    model, ids, stepper = _make(optimizer)
    losses = []
    for _ in range(NUM_STEPS):
        stepper.zero_grad()
        losses.append(model(ids))
        losses[-1].backward()
        stepper.step()
    return Run(values=_values(model, stepper, losses), sizes=(), num_retries=0)


def run_steps(optimizer: str, failures: Failures = NONE, *, kept: bool = True) -> Run:
    """Runs the steps with every unit kept, or recomputed, and every op retried.

    The failure is a passing one: an op runs again also where no record is left to evict, as in the
    optimizer's step.
    """
    model, ids, stepper = _make(optimizer)
    engine = Engine(model)
    engine.apply(Plan(actions=(Keep() if kept else Recompute(),) * len(engine.units)))
    asked, losses, sizes = [], [], []

    def relieve(num_bytes: int, where: str) -> int:
        asked.append(where)
        engine.ledger.evict(num_bytes, spare_active=True)
        return 1

    for step in range(NUM_STEPS):
        stepper.zero_grad()
        with failures.probe(step) as probe, OpRetry(relieve):
            losses.append(model(ids))
            losses[-1].backward()
            stepper.step()
        sizes.append((probe.num_ops, probe.num_allocations))
    engine.detach()
    values = _values(model, stepper, losses)
    return Run(values=values, sizes=tuple(sizes), num_retries=len(asked))


@dataclass(kw_only=True)
class Tally:
    """One row of the result."""

    optimizer: str
    action: str
    failure: str
    positions: int = 0
    """Positions at which memory ran out."""
    recovered: int = 0
    """Answered by one retry of the op, with the same bits."""
    stopped_cleanly: int = 0
    """The error was passed on."""
    wrong: int = 0
    """Finished with other bits, or retried more or less than once."""


def sweep(optimizer: str, *, kept: bool, kind: str, stride: int = 1) -> Tally:
    """Lets memory run out at every position (or every `stride`-th) of every step."""
    tally = Tally(optimizer=optimizer, action="keep" if kept else "recompute", failure=kind)
    wanted = run_plain(optimizer)
    for step, size in enumerate(run_steps(optimizer, kept=kept).sizes):
        last = size[FAILURES.index(kind)]
        for position in range(1 + step % stride, last + 1, stride):
            failures = Failures(step=step, kind=kind, positions=(position,))
            tally.positions += 1
            try:
                found = run_steps(optimizer, failures, kept=kept)
            except torch.OutOfMemoryError:
                tally.stopped_cleanly += 1
                continue
            if found.num_retries == 1 and not found.wrong(wanted):
                tally.recovered += 1
            else:
                tally.wrong += 1
    return tally


def _make(optimizer: str) -> tuple[Tiny, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    ids = torch.randint(0, 11, (2, 4))
    return model, ids, OPTIMIZERS[optimizer](model.parameters())


def _values(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    values = {f"loss {i}": loss for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, "every parameter is used"
        values |= {f"weight {name}": parameter, f"gradient of {name}": parameter.grad}
    values |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for i, state in enumerate(optimizer.state.values()):
        tensors = {key: v for key, v in state.items() if isinstance(v, torch.Tensor)}
        values |= {f"optimizer {i} {key}": v for key, v in tensors.items()}
    values["generator"] = torch.get_rng_state()
    return {name: value.detach().clone() for name, value in values.items()}


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return not torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def main(arguments: list[str]) -> int:
    """Prints the tally of every optimizer, action and kind of failure; 1 if any was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows alone, for scripts")
    parser.add_argument("--stride", type=int, default=1, help="only every n-th position")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [
        sweep(optimizer, kept=kept, kind=kind, stride=options.stride)
        for optimizer in OPTIMIZERS
        for kept in (True, False)
        for kind in FAILURES
    ]
    totals = {
        key: sum(getattr(row, key) for row in rows)
        for key in ("positions", "recovered", "stopped_cleanly", "wrong")
    }
    if options.json:
        print(json.dumps({**totals, "rows": [asdict(row) for row in rows]}))
    else:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in asdict(row).items()))
        print("  ".join(f"{key} {value}" for key, value in totals.items()))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

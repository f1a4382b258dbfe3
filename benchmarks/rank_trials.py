"""One training on one of two ranks in which memory runs out where a trial says.

What `rank_faults.py` runs many of; the fits of Lightning are in `rank_fits.py`.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rematic
from rematic.memory import SimulatedProbe, load_compiler_now
from rematic.recipes import PolicyConfig, Recipe
from tests.step_models import WIDTH, Block

# What ranks need, they have from the server that forks them: DDP alone loads a thousand modules.
load_compiler_now()

NUM_RANKS = 2
NUM_BATCHES = 6
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-small-buckets": {"bucket_cap_mb": 0.001},
    "ddp-unused": {"bucket_cap_mb": 0.001, "find_unused_parameters": True},
    "ddp-bucket-view": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "ddp-static": {"static_graph": True},
    "fsdp2": {},
    "lightning-callback": {},
    "lightning-ddp": {},
    "lightning-fsdp2": {},
}
"""Plain loops, and fits of Lightning: the callback over its DDP, and rematic's strategies."""
PLACES = ("op", "unit", "forward", "loss", "backward", "optimizer", "torn")
"""At one op; inside a unit's forward; where only the whole step can answer; at one op of the
optimizer, with the retry at the op and without."""
RANKS = ((0,), (1,), (0, 1))
Progress = Callable[[], object]
"""Called after every micro-batch: this rank does not hang."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What trains, and where memory runs out."""

    strategy: str
    place: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    """Micro-batches in which it does, on each of those ranks."""
    block: int
    accumulate: int
    alternating: bool = False
    """Whether the failing ranks take turns."""

    @property
    def is_fit(self) -> bool:
        """Whether Lightning trains."""
        return self.strategy.startswith("lightning")

    @property
    def recipe(self) -> Recipe:
        """The recipe of the session: the retry at the op is off where others are looked at."""
        sharded = self.strategy.endswith("fsdp2")  # never repeated whole: `auto` must see to it
        retries = {"op": "auto" if sharded else "always", "optimizer": "always"}
        op_retry: Any = retries.get(self.place, "never")
        return Recipe(policy=PolicyConfig(op_retry=op_retry, trust=("*",)))

    def fails(self, rank: int, step: int) -> bool:
        """Returns whether memory runs out on a rank in a micro-batch."""
        if step not in self.steps or rank not in self.ranks:
            return False
        return not self.alternating or self.steps.index(step) % NUM_RANKS == rank

    def fails_in_update(self, rank: int, step: int) -> bool:
        """Returns whether it does in the optimizer's step after a micro-batch."""
        accumulated = range(step + 1 - self.accumulate, step + 1)
        in_update = self.place in ("optimizer", "torn")
        return in_update and any(self.fails(rank, earlier) for earlier in accumulated)

    def failing_ops(self) -> SimulatedProbe:
        """Returns a memory that runs out at one op of a micro-batch, from its middle on."""
        return SimulatedProbe(fail_at_ops=[150 + 20 * self.block])

    def failing_update(self) -> SimulatedProbe:
        """Returns one that does in an update; at block 0 before anything has changed."""
        return SimulatedProbe(fail_at_ops=[1 + 20 * self.block])


def draw_trial(strategy: str, seed: int) -> Trial:
    """Draws a combination."""
    draw = random.Random(seed)
    ranks = draw.choice(RANKS)
    accumulate = draw.choice((1, 3)) if strategy != "ddp-static" else 1  # torch 2.13 fails plainly
    return Trial(
        strategy=strategy,
        place=draw.choice(PLACES),
        ranks=ranks,
        steps=tuple(sorted(draw.sample(range(NUM_BATCHES), draw.randint(1, 3)))),
        block=draw.randrange(3),
        accumulate=accumulate,
        alternating=len(ranks) > 1 and draw.random() < 0.5,
    )


FAULTS: list[tuple[str, int]] = []
"""Where memory runs out next, once. (Not in the model, whose state a repetition puts back.)"""


def comes(place: tuple[str, int]) -> bool:
    """Returns whether memory runs out here, and notes that it has."""
    if place not in FAULTS:
        return False
    FAULTS.remove(place)
    return True


def expect(trial: Trial, rank: int, step: int) -> None:
    """Notes where memory runs out in a micro-batch."""
    if trial.fails(rank, step) and trial.place in ("unit", "forward", "loss", "backward"):
        FAULTS.append((trial.place, 0 if trial.place == "loss" else trial.block))


class NeverFailed(Exception):
    """Memory did not run out where a trial wanted it to."""


class Net(nn.Module):
    """Blocks in which memory may run out."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for i, block in enumerate(self.blocks):
            block.norm.register_forward_pre_hook(functools.partial(_fail_in_unit, i))
        self.head = nn.Linear(WIDTH, 2)
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, seq, WIDTH)` to `(batch, seq, 2)`."""
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if comes(("forward", i)):
                raise torch.OutOfMemoryError("injected in forward")
            if comes(("backward", i)):
                x.register_hook(_fail)
        return self.head(x) + 0.0  # FSDP warns of views


def _fail_in_unit(position: int, *_: object) -> None:
    if not rematic.replaying() and comes(("unit", position)):
        raise torch.OutOfMemoryError("injected in a unit")


def _fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("injected in backward")


def shard(model: Net, mesh: Any) -> nn.Module:  # noqa: ANN401 - a device mesh
    """Shards every block and the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _wrap(model: Net, strategy: str) -> nn.Module:
    if strategy == "fsdp2":
        return shard(model, init_device_mesh("cpu", (NUM_RANKS,)))
    return nn.parallel.DistributedDataParallel(model, **STRATEGIES[strategy])


def batches_of(rank: int) -> list[torch.Tensor]:
    """Returns what a rank trains on, `(4, 3, WIDTH)` each."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, WIDTH, generator=generator) for _ in range(NUM_BATCHES)]


def train(
    trial: Trial, rank: int, *, faulty: bool, progress: Progress = lambda: None
) -> dict[str, torch.Tensor]:
    """Trains in a plain loop; returns what must have the same bits.

    Raises:
        NeverFailed: If memory was to run out somewhere and has not.
    """
    FAULTS.clear()
    torch.manual_seed(0)
    model = Net(unused=trial.strategy == "ddp-unused")
    wrapped = _wrap(model, trial.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    session = None
    if faulty:
        session = rematic.attach(
            model, optimizer, policy="keep", recipe=trial.recipe, budget="64GiB"
        )
    torch.manual_seed(40 + rank)
    for step, x in enumerate(batches_of(rank)):
        last = (step + 1) % trial.accumulate == 0
        if faulty:
            expect(trial, rank, step)

        def run(x: torch.Tensor, last: bool = last) -> None:
            _forward_and_backward(wrapped, x, last=last)

        fails_at_op = faulty and trial.place == "op" and trial.fails(rank, step)
        with failing(trial.failing_ops() if fails_at_op else None):
            run(x) if session is None else session.run(run, x)
        progress()
        if last:
            fails = faulty and trial.fails_in_update(rank, step)
            with failing(trial.failing_update() if fails else None):
                optimizer.step()
            optimizer.zero_grad()
        if FAULTS:
            raise NeverFailed(str(FAULTS))
    if session is not None:
        session.detach()
        dist.barrier()  # as before a last checkpoint: the ranks must have come so far
    return values_of(model)


@contextlib.contextmanager
def failing(probe: SimulatedProbe | None) -> Any:  # noqa: ANN401 - an iterator
    """Runs the body under a memory that must run out in it; None for one that does not.

    Raises:
        NeverFailed: If it has not.
    """
    with contextlib.nullcontext() if probe is None else probe:
        yield
    if probe is not None and not probe.num_ooms:
        raise NeverFailed(f"{probe.num_ops} ops")


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns weights (this rank's part), buffers and the generator."""
    values = {name: _local(p) for name, p in model.named_parameters()}
    values |= {name: b.clone() for name, b in model.named_buffers()}
    return {**values, "generator": torch.get_rng_state()}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().clone()


def _forward_and_backward(wrapped: nn.Module, x: torch.Tensor, *, last: bool) -> None:
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not last:
        with wrapped.no_sync():
            _one_pass(wrapped, x)
    else:
        _one_pass(wrapped, x)


def _one_pass(wrapped: nn.Module, x: torch.Tensor) -> None:
    loss = wrapped(x).square().mean()
    if comes(("loss", 0)):
        raise torch.OutOfMemoryError("injected in the loss")
    loss.backward()

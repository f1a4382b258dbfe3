"""Lets memory run out on one rank or on both, and looks for hangs and for ranks that drift apart.

Two processes over gloo train a small model with dropout, running statistics and different data,
once plainly and once with failures. A trial ends as `recovered` (weights, buffers and generators of
each rank have the bits of the plain run), `aborted` (every rank raised in time) or `wrong`.

    .venv/bin/python benchmarks/rank_faults.py --json --trials 100

Minutes on two cores; the tests run six trials (tests/test_rank_faults.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the blocks are those of the tests

import rematic
from rematic.memory import SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe
from tests.step_models import WIDTH, Block

NUM_RANKS = 2
WATCHDOG_SECONDS = 30
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-small-buckets": {"bucket_cap_mb": 0.001},
    "ddp-unused": {"bucket_cap_mb": 0.001, "find_unused_parameters": True},
    "ddp-bucket-view": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "ddp-static": {"static_graph": True},
    "fsdp2": {},
}
PLACES = ("op", "unit", "forward", "loss", "backward", "optimizer", "torn")
"""At one op; inside a unit's forward; where only the whole step can answer; at one op of the
optimizer, with the retry at the op and without."""
RANKS = ((0,), (1,), (0, 1))


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

    def fails(self, rank: int, step: int) -> bool:
        """Returns whether memory runs out on a rank in a micro-batch."""
        if step not in self.steps or rank not in self.ranks:
            return False
        return not self.alternating or self.steps.index(step) % NUM_RANKS == rank


def draw_trial(strategy: str, seed: int) -> Trial:
    """Draws a combination."""
    draw = random.Random(seed)
    ranks = draw.choice(RANKS)
    accumulate = draw.choice((1, 3)) if strategy != "ddp-static" else 1  # torch 2.13 fails plainly
    return Trial(
        strategy=strategy,
        place=draw.choice(PLACES),
        ranks=ranks,
        steps=tuple(sorted(draw.sample(range(6), draw.randint(1, 3)))),
        block=draw.randrange(3),
        accumulate=accumulate,
        alternating=len(ranks) > 1 and draw.random() < 0.5,
    )


_FAULTS: list[tuple[str, int]] = []
"""Where memory runs out next, once. (Not in the model, whose state a repetition puts back.)"""


def _comes(place: tuple[str, int]) -> bool:
    if place not in _FAULTS:
        return False
    _FAULTS.remove(place)
    return True


class Net(nn.Module):
    """Blocks in which memory may run out."""

    def __init__(self, *, unused: bool) -> None:
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
            if _comes(("forward", i)):
                raise torch.OutOfMemoryError("injected in forward")
            if _comes(("backward", i)):
                x.register_hook(_fail)
        return self.head(x) + 0.0  # FSDP warns of views


def _fail_in_unit(position: int, *_: object) -> None:
    if not rematic.replaying() and _comes(("unit", position)):
        raise torch.OutOfMemoryError("injected in a unit")


def _fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("injected in backward")


def _wrap(model: Net, strategy: str) -> nn.Module:
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return nn.parallel.DistributedDataParallel(model, **STRATEGIES[strategy])


def train(trial: Trial, rank: int, *, faulty: bool) -> dict[str, torch.Tensor]:
    """Trains six micro-batches; returns what must have the same bits."""
    _FAULTS.clear()
    torch.manual_seed(0)
    model = Net(unused=trial.strategy == "ddp-unused")
    wrapped = _wrap(model, trial.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    op_retry = "auto" if trial.place in ("op", "optimizer") else "never"
    recipe = Recipe(policy=PolicyConfig(op_retry=op_retry, trust=("*",)))
    session = None
    if faulty:
        session = rematic.attach(model, optimizer, policy="keep", recipe=recipe, budget="64GiB")
    torch.manual_seed(40 + rank)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(4, 3, WIDTH, generator=generator)
        last = (step + 1) % trial.accumulate == 0
        failing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if faulty and trial.fails(rank, step):
            _FAULTS.append((trial.place, 0 if trial.place == "loss" else trial.block))
            if trial.place == "op":
                failing = SimulatedProbe(fail_at_ops=[150 + 20 * trial.block])

        def run(x: torch.Tensor, last: bool = last) -> None:
            _forward_and_backward(wrapped, x, last=last)

        with failing:
            run(x) if session is None else session.run(run, x)
        if last:
            fails = faulty and _fails_in_update(trial, rank, step)
            with _failing_update(trial.block) if fails else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.detach()
        dist.barrier()  # as before a last checkpoint: the ranks must have come so far
    values = {name: _local(p) for name, p in model.named_parameters()}
    values |= {name: b.clone() for name, b in model.named_buffers()}
    return {**values, "generator": torch.get_rng_state()}


def _fails_in_update(trial: Trial, rank: int, step: int) -> bool:
    accumulated = range(step + 1 - trial.accumulate, step + 1)
    in_update = trial.place in ("optimizer", "torn")
    return in_update and any(trial.fails(rank, earlier) for earlier in accumulated)


def _failing_update(block: int) -> SimulatedProbe:
    return SimulatedProbe(fail_at_ops=[1 + 20 * block])  # at block 0 before anything has changed


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
    if _comes(("loss", 0)):
        raise torch.OutOfMemoryError("injected in the loss")
    loss.backward()


def _worker(rank: int, trials: list[Trial], store: str, results: Any) -> None:  # noqa: ANN401
    torch.set_num_threads(1)
    logging.getLogger("rematic").setLevel(logging.ERROR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=WATCHDOG_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timeout
    )
    for i, trial in enumerate(trials):
        try:
            wanted = train(trial, rank, faulty=False)
            found = train(trial, rank, faulty=True)
        except RuntimeError as error:
            results.put((rank, i, f"aborted: {type(error).__name__}: {str(error)[:300]}"))
            return  # the group is gone: the other trials need new processes
        wrong = [n for n, value in wanted.items() if not torch.equal(value, found[n])]
        results.put((rank, i, f"wrong: {wrong[:3]}" if wrong else "recovered"))
    dist.destroy_process_group()


def run_trials(trials: list[Trial]) -> Iterator[tuple[Trial, list[str]]]:
    """Yields each trial with the outcome of every rank."""
    while trials:
        outcomes = _run_until_aborted(trials)
        done = [o for o in outcomes if len(o) == NUM_RANKS]
        yield from zip(trials, done, strict=False)
        if len(done) < len(outcomes) or not done:
            yield trials[len(done)], ["wrong: a rank hangs or died"]
            done.append([])
        trials = trials[len(done) :]


def _run_until_aborted(trials: list[Trial]) -> list[list[str]]:
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (trials, f"{folder}/store", results)
        ranks = [
            context.Process(target=_worker, args=(rank, *arguments)) for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        outcomes = _collect(results, ranks, len(trials))
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    return outcomes


def _collect(results: Any, ranks: list[Any], num_trials: int) -> list[list[str]]:  # noqa: ANN401
    found: dict[int, list[str]] = {}
    seen = time.monotonic()
    while time.monotonic() - seen < WATCHDOG_SECONDS + 30 * (not found):  # starting takes longer
        if not results.empty():
            _, i, outcome = results.get()
            found.setdefault(i, []).append(outcome)
            seen = time.monotonic()
            ended = outcome.startswith("aborted") or i == num_trials - 1
            if ended and len(found[i]) == NUM_RANKS:
                break
        elif not any(process.is_alive() for process in ranks) and results.empty():
            break
        else:
            time.sleep(0.02)
    return [found[i] for i in sorted(found)]


def judge(outcomes: list[str]) -> str:
    """Returns what became of a trial."""
    if all(outcome == "recovered" for outcome in outcomes):
        return "recovered"
    return "aborted" if all(o.startswith("aborted") for o in outcomes) else "wrong"


def main(arguments: list[str]) -> int:
    """Prints the counts of every strategy; 1 if any trial was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--trials", type=int, default=100, help="of each strategy")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    options = parser.parse_args(arguments)
    counts: dict[str, Counter[str]] = {}
    wrong: list[dict[str, object]] = []
    for strategy in options.strategies:
        trials = [draw_trial(strategy, seed) for seed in range(options.trials)]
        counts[strategy] = Counter(recovered=0, aborted=0, wrong=0)
        for trial, outcomes in run_trials(trials):
            outcome = judge(outcomes)
            counts[strategy][outcome] += 1
            if outcome == "wrong" or (outcome == "aborted" and not options.json):
                wrong += [{**asdict(trial), "outcomes": outcomes}] if outcome == "wrong" else []
                print(trial, outcomes, file=sys.stderr, flush=True)
        if not options.json:
            print(strategy, dict(counts[strategy]), flush=True)
    totals = {
        key: sum(c[key] for c in counts.values()) for key in ("recovered", "aborted", "wrong")
    }
    if options.json:
        print(json.dumps({**totals, "by_strategy": counts, "examples": wrong[:10]}))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

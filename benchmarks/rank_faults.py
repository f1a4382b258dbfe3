"""Lets memory run out on one rank or on both, and looks for hangs and for ranks that drift apart.

Two processes over gloo train a small model with dropout, running statistics and different data,
once plainly and once with failures. A trial ends as `recovered` (weights, buffers and generators of
each rank have the bits of the plain run, logged metrics too), `aborted` (every rank raised in time)
or `wrong`.

    .venv/bin/python benchmarks/rank_faults.py --json --trials 100

Minutes on two cores; the tests run a few trials (tests/test_rank_faults.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the blocks are those of the tests

from benchmarks.rank_fits import fit
from benchmarks.rank_trials import NUM_RANKS, STRATEGIES, NeverFailed, Trial, draw_trial, train

WATCHDOG_SECONDS = 30
"""In which all ranks wait, or which a rank computes, without a micro-batch: a hang. Time in which
one of them could compute and the machine gives it no processor does not count."""
_STARTING_SECONDS = 300
"""Until both ranks are there."""
_COLLECTIVE_SECONDS = 1800
"""Until a collective gives up: longer than any hang that is seen here."""
_ALIVE = "alive"


def _worker(rank: int, trials: list[Trial], store: str, results: Any) -> None:  # noqa: ANN401
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("rematic", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=_COLLECTIVE_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timeout
    )
    results.put((rank, -1, _ALIVE))
    for i, trial in enumerate(trials):

        def progress(i: int = i) -> None:
            results.put((rank, i, _ALIVE))

        run = fit if trial.is_fit else train
        try:
            wanted = run(trial, rank, faulty=False, progress=progress)
            found = run(trial, rank, faulty=True, progress=progress)
        except RuntimeError as error:
            results.put((rank, i, f"aborted: {type(error).__name__}: {str(error)[:1000]}"))
            return  # the group is gone: the other trials need new processes
        except NeverFailed as error:
            results.put((rank, i, f"wrong: memory did not run out: {error}"))
            return
        wrong = [n for n, value in wanted.items() if not torch.equal(value, found[n])]
        results.put((rank, i, f"wrong: {wrong[:3]}" if wrong else "recovered"))
    dist.destroy_process_group()


def run_trials(trials: list[Trial]) -> Iterator[tuple[Trial, list[str]]]:
    """Yields each trial with the outcome of every rank."""
    # Ranks that were stopped are replaced without imports. There is one server for all strategies.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.rank_fits"])
    while trials:
        outcomes = _run_until_aborted(context, trials)
        done = [o for o in outcomes if len(o) == NUM_RANKS]
        yield from zip(trials, done, strict=False)
        if len(done) < len(outcomes) or not done:
            yield trials[len(done)], ["wrong: a rank hangs or died"]
            done.append([])
        trials = trials[len(done) :]


def _run_until_aborted(context: Any, trials: list[Trial]) -> list[list[str]]:  # noqa: ANN401
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
    idle = Idle([process.pid for process in ranks])
    num_started = 0
    while idle.seconds() < (WATCHDOG_SECONDS if num_started == NUM_RANKS else _STARTING_SECONDS):
        if not results.empty():
            _, i, outcome = results.get()
            idle.restart()
            if outcome == _ALIVE:
                num_started += i < 0
                continue
            found.setdefault(i, []).append(outcome)
            ended = not outcome.startswith("recovered") or i == num_trials - 1
            if ended and len(found[i]) == NUM_RANKS:
                break
        elif not any(process.is_alive() for process in ranks) and results.empty():
            break
        else:
            time.sleep(0.02)
    return [found[i] for i in sorted(found)]


class Idle:
    """The time for which processes have done nothing that they tell of, on a machine of any load.

    Args:
        pids: Their numbers.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self.restart()

    def restart(self) -> None:
        """Begins anew: one of them has told of something."""
        self._waited = 0.0
        self._read = time.monotonic()
        self._computed = self._cpu_seconds()

    def seconds(self) -> float:
        """Returns the seconds in which all of them waited, and those that they computed."""
        now = time.monotonic()
        if not any(self._is_running(process) for process in self._processes):
            self._waited += now - self._read
        self._read = now
        return self._waited + max(0.0, self._cpu_seconds() - self._computed)

    @staticmethod
    def _is_running(process: psutil.Process) -> bool:
        try:
            return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        except psutil.NoSuchProcess:
            return False

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


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
            counts[strategy][f"{trial.place} {outcome}"] += 1
            if outcome == "wrong":
                wrong.append({**asdict(trial), "outcomes": outcomes})
            if outcome == "wrong" or (outcome == "aborted" and not options.json):
                print(trial, outcomes, file=sys.stderr, flush=True)
        print(strategy, dict(counts[strategy]), file=sys.stderr, flush=True)
    totals = {
        key: sum(c[key] for c in counts.values()) for key in ("recovered", "aborted", "wrong")
    }
    print(json.dumps({**totals, "by_strategy": counts, "examples": wrong[:10]}))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

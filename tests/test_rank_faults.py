"""A slice of benchmarks/rank_faults.py: memory runs out on some of two ranks (cases F1, B1, B2)."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks.rank_faults import Idle, judge, run_trials
from benchmarks.rank_trials import PLACES, STRATEGIES, Trial, draw_trial


def trial(strategy: str, place: str, **changes: Any) -> Trial:
    defaults: dict[str, Any] = {"ranks": (1,), "steps": (2,), "block": 1, "accumulate": 1}
    return Trial(strategy=strategy, place=place, **{**defaults, **changes})


def test_one_rank_recovers_while_the_other_waits_or_both_stop() -> None:
    recovered = [
        trial("ddp-unused", "backward", ranks=(0, 1), steps=(1, 3), alternating=True),
        trial("ddp", "forward", ranks=(0, 1), accumulate=3),
        trial("ddp-small-buckets", "backward", steps=(0, 2, 5), accumulate=3),
        trial("fsdp2", "unit", ranks=(0,)),
        trial("fsdp2", "optimizer", ranks=(0, 1)),
    ]
    stopped = [trial("ddp-static", "backward"), trial("ddp", "torn", steps=(5,), block=0)]
    outcomes = [(t, result) for t, result in run_trials([*recovered, *stopped])]
    assert [(t, judge(result)) for t, result in outcomes] == [
        *((t, "recovered") for t in recovered),
        *((t, "aborted") for t in stopped),
    ], outcomes
    assert any("static_graph" in text for text in outcomes[-2][1])
    assert any("TornOptimizerStepError" in text for text in outcomes[-1][1])


def test_fits_of_lightning() -> None:
    recovered = [
        trial("lightning-fsdp2", "op", steps=(5,), block=2),  # in the wrapper's own ops, late
        trial("lightning-fsdp2", "optimizer", steps=(0,), block=0),  # in its first step
        trial("lightning-ddp", "backward", steps=(1,)),
        trial("lightning-callback", "optimizer", ranks=(0, 1), steps=(0,)),
    ]
    stopped = [trial("lightning-fsdp2", "loss")]
    outcomes = [(t, result) for t, result in run_trials([*recovered, *stopped])]
    assert [(t, judge(result)) for t, result in outcomes] == [
        *((t, "recovered") for t in recovered),
        *((t, "aborted") for t in stopped),
    ], outcomes


def _started(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", f"print('there', flush=True)\n{code}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_that_waits_is_idle_and_one_without_a_processor_is_not() -> None:
    waiting, computing = _started("input()"), _started("while True: pass")
    try:
        while psutil.Process(waiting.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.05)
        idle, both = Idle([waiting.pid]), Idle([waiting.pid, computing.pid])
        time.sleep(0.3)
        assert idle.seconds() >= 0.3
        seconds = both.seconds()
        assert seconds <= sum(
            sum(psutil.Process(p.pid).cpu_times()[:2]) for p in (waiting, computing)
        )
    finally:
        for process in (waiting, computing):
            process.kill()
            process.communicate()


def test_trials_cover_every_place() -> None:
    drawn = [draw_trial("ddp", seed) for seed in range(100)]
    assert {t.place for t in drawn} == set(PLACES)
    assert {t.ranks for t in drawn} == {(0,), (1,), (0, 1)}
    assert any(t.alternating for t in drawn)
    assert len(STRATEGIES) == 9

"""A slice of benchmarks/rank_faults.py: memory runs out on some of two ranks (cases F1, B1, B2)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rank_faults import judge, run_trials
from benchmarks.rank_trials import PLACES, STRATEGIES, Trial, draw_trial


def trial(strategy: str, place: str, **changes: Any) -> Trial:
    defaults: dict[str, Any] = {"ranks": (1,), "steps": (2,), "block": 1, "accumulate": 1}
    return Trial(strategy=strategy, place=place, **{**defaults, **changes})


@pytest.mark.timeout(240)
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


def test_trials_cover_every_place() -> None:
    drawn = [draw_trial("ddp", seed) for seed in range(100)]
    assert {t.place for t in drawn} == set(PLACES)
    assert {t.ranks for t in drawn} == {(0,), (1,), (0, 1)}
    assert any(t.alternating for t in drawn)
    assert len(STRATEGIES) == 9

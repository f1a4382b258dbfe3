from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from rematic.journal import describe_plan, prediction_error, summarize

MIB = 1 << 20


def step(number: int, **fields: object) -> dict[str, object]:
    """One step event as the session writes it."""
    defaults: dict[str, object] = {
        "event": "step",
        "step": number,
        "batch": 1,
        "length": 100,
        "tokens": 100,
        "padded": False,
        "policy": "planned",
        "plan": {"keep": 8, "recompute": 0},
        "predicted_peak_bytes": 99 * MIB,
        "peak_bytes": 100 * MIB,
        "budget_bytes": 200 * MIB,
        "seconds": 2.0,
        "evictions": 0,
        "evicted_bytes": 0,
        "op_retries": 0,
        "unit_retries": 0,
        "replays": 0,
    }
    return {**defaults, **fields}


START = {
    "event": "run_start",
    "name": "tiny-2",
    "recipe": "tiny",
    "corpus_sha256": "ab" * 32,
    "versions": {"rematic": "0.1.0"},
}
END = {"event": "run_end", "status": "finished", "reason": None, "last_loss": 2.5}

RUN: list[Mapping[str, object]] = [
    START,
    {"event": "attach", "units": ["a"]},
    step(1),
    step(
        2,
        plan={"keep": 5, "recompute": 3},
        length=900,
        tokens=900,
        predicted_peak_bytes=180 * MIB,
        peak_bytes=200 * MIB,
        seconds=6.0,
        replays=3,
        evictions=2,
        evicted_bytes=10 * MIB,
        op_retries=1,
    ),
    {"event": "evict", "step": 2},
    step(3, length=50, tokens=50, predicted_peak_bytes=None, unit_retries=1, step_retries=2),
    {"event": "switch", "from": "planned", "to": "recompute"},
    step(4, policy="recompute", plan={"recompute": 8}, peak_bytes=210 * MIB),
    {"event": "rollback", "from": "recompute", "to": "planned"},
    {"event": "checkpoint", "step": 4, "path": "runs/tiny-2/last.ckpt"},
    END,
]


def test_adds_a_run_up() -> None:
    summary = summarize(RUN)
    assert (summary.name, summary.recipe, summary.status) == ("tiny-2", "tiny", "finished")
    assert (summary.steps, summary.tokens, summary.seconds) == (4, 1150, 12.0)
    assert summary.tokens_per_second == pytest.approx(1150 / 12)
    assert (summary.peak_bytes, summary.peak_step) == (210 * MIB, 4)
    assert (summary.budget_bytes, summary.steps_over_budget) == (200 * MIB, 1)
    assert (summary.evictions, summary.evicted_bytes) == (2, 10 * MIB)
    assert (summary.op_retries, summary.unit_retries, summary.step_retries) == (1, 1, 2)
    assert summary.replays == 3
    assert (summary.switches, summary.rollbacks, summary.batches_lost) == (1, 1, 0)
    assert summary.last_loss == 2.5
    assert summary.checkpoint == "runs/tiny-2/last.ckpt"
    assert dict(summary.versions) == {"rematic": "0.1.0"}


def test_prediction_errors_are_over_the_measured_peak() -> None:
    summary = summarize(RUN)
    assert summary.predictions == 2
    assert summary.prediction_error_median == pytest.approx((0.01 + 111 / 210) / 2)
    assert summary.prediction_error_max == pytest.approx(111 / 210)
    assert prediction_error(step(1, predicted_peak_bytes=110 * MIB)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_bytes": None},
        {"peak_bytes": 0},
        {"predicted_peak_bytes": None},
        {"evictions": 1},
        {"op_retries": 1},
        {"unit_retries": 1},
        {"peak_source": "unit ends"},  # sampled, and below the prediction
        {"peak_source": "start of backward"},
    ],
    ids=lambda changes: "-".join(map(str, next(iter(changes.items())))),
)
def test_some_steps_say_nothing_about_predictions(changes: dict[str, object]) -> None:
    assert prediction_error(step(1, **{"predicted_peak_bytes": 100 * MIB, **changes})) is None


def test_a_run_counts_no_sampled_peak_below_its_prediction() -> None:
    sampled = {"peak_source": "unit ends", "predicted_peak_bytes": 200 * MIB}
    exact = {"peak_source": "op ends", "predicted_peak_bytes": 101 * MIB}
    summary = summarize([step(0, **exact), *(step(n, **sampled) for n in (1, 2, 3))])
    assert summary.predictions == 1
    assert summary.prediction_error_max == pytest.approx(0.01)


@pytest.mark.parametrize("source", ["op ends", "unit ends", "start of backward"])
def test_a_peak_above_the_prediction_counts_wherever_it_was_read(source: str) -> None:
    assert prediction_error(step(1, peak_source=source)) == pytest.approx(0.01)


def test_groups_the_steps_by_policy_and_plan() -> None:
    plans = summarize(RUN).plans
    assert [(p.policy, p.plan, p.steps, p.min_length, p.max_length) for p in plans] == [
        ("planned", "keep 8", 2, 50, 100),
        ("planned", "keep 5, recompute 3", 1, 900, 900),
        ("recompute", "recompute 8", 1, 100, 100),
    ]
    assert [plan.seconds for plan in plans] == [4.0, 6.0, 2.0]
    assert plans[1].peak_bytes == 200 * MIB


def test_a_stop_is_a_lost_batch() -> None:
    summary = summarize([START, step(1), {"event": "stop", "step": 2, "reason": "full"}])
    assert (summary.steps, summary.batches_lost, summary.status) == (1, 1, "unfinished")


def test_a_stop_between_steps_loses_no_batch() -> None:
    stop = {"event": "stop", "step": 2, "reason": "a person must decide", "batch": None}
    assert summarize([START, step(1), stop]).batches_lost == 0


def test_steps_that_a_resumed_run_repeats_count_once() -> None:
    resumed = {**START, "resumed_after_step": 2}
    first = [START, step(1), step(2), step(3, tokens=7), {"event": "stop", "step": 4}]
    summary = summarize([*first, resumed, step(3, tokens=9), step(4), END])
    assert (summary.steps, summary.tokens) == (4, 309)
    assert (summary.status, summary.batches_lost) == ("finished", 0)


def test_a_part_that_trained_nothing_keeps_the_last_loss() -> None:
    nothing = {"event": "run_end", "status": "finished", "last_loss": None}
    assert summarize([START, step(1), END, START, nothing]).last_loss == 2.5


def test_a_run_without_steps_has_no_figures() -> None:
    summary = summarize([])
    assert summary.status == "unfinished"
    assert (summary.steps, summary.plans) == (0, ())
    assert summary.tokens_per_second is None
    assert summary.peak_bytes is None
    assert summary.prediction_error_median is None


def test_is_plain_for_json() -> None:
    plain = json.loads(json.dumps(summarize(RUN).to_dict()))
    assert plain["plans"][1]["plan"] == "keep 5, recompute 3"
    assert plain["batches_lost"] == 0


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"keep": 5, "recompute": 3}, "keep 5, recompute 3"),
        ({"keep": 8, "recompute": 0}, "keep 8"),
        ({}, "no units"),
        ("keep", "keep"),
    ],
    ids=["mixed", "one", "none", "word"],
)
def test_describes_a_plan(plan: object, words: str) -> None:
    assert describe_plan(plan) == words

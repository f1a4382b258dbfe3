"""A slice of benchmarks/fault_sweep.py: memory runs out somewhere in whole steps."""

from __future__ import annotations

import pytest

from benchmarks.fault_sweep import check_plain, random_trials, sweep
from benchmarks.fault_trials import KINDS, LEVELS, Setting, judge, positions_inside_units


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_alone_and_all_together(level: str) -> None:
    setting = Setting(model="tied", action="keep", level=level)
    counts, wrong = sweep(setting, stride=17, limit=16)
    assert wrong == []
    assert counts["recovered"] > 0
    assert (counts["stopped_cleanly"] == 0) == (level == "all")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "action"),
    [
        ("mlp", "recompute"),
        ("batch-norm", "selective"),
        ("transformer-encoder", "offload"),
        ("gpt2", "recompute+offload"),
    ],
)
def test_every_failure_is_recovered_with_all_answers(model: str, action: str, kind: str) -> None:
    setting = Setting(model=model, action=action, level="all", accumulate=3, kind=kind)
    counts, wrong = sweep(setting, stride=1, limit=3)
    assert wrong == []
    assert counts["recovered"] == sum(counts.values())


def test_units_answer_every_failure_inside_them() -> None:
    """From the second step on: in the first, the safety check replays one of them as well."""
    setting = Setting(model="tied", action="keep", level="unit")
    inside = positions_inside_units(setting)[2:]
    assert len(inside) == 2
    for positions in inside:
        for position in positions[::9]:
            assert judge(setting, (position,)) == "recovered"


def test_mixed_precision_and_several_failures() -> None:
    counts, wrong = random_trials(6, ["tied", "mlp"], ["keep", "recompute"])
    assert wrong == []
    assert counts["positions"] == 6


def test_a_run_without_failures_is_the_plain_one() -> None:
    setting = Setting(model="tied", action="compress", level="all", accumulate=3)
    assert check_plain(setting) is None


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators that are not put back are one of the ways to be wrong."""
    monkeypatch.setattr("rematic.transaction.step_transaction._generator_states", lambda *_: [])
    _, wrong = sweep(Setting(model="tied", action="keep", level="step"), stride=1, limit=16)
    assert wrong

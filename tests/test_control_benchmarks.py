"""Slices of benchmarks/control_decisions.py and benchmarks/killed_runs.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.control_decisions import FEEDS, measure
from benchmarks.killed_runs import run_trial


def test_decisions_are_quick() -> None:
    """The bar is 100,000 a second; a busy machine gets a part of that."""
    rows = {row["feed"]: row for row in measure(5000, rounds=3)}
    assert set(FEEDS) < set(rows)
    assert all(int(str(row["per_second"])) > 20_000 for row in rows.values())
    assert rows["quiet"]["changes"] == 0
    assert int(str(rows["memory always short"]["changes"])) > 1


@pytest.mark.skipif(sys.platform == "win32", reason="nothing to fork or to kill by a signal")
@pytest.mark.parametrize("delay_seconds", [0.01, 0.3])
def test_a_killed_run_resumes_under_the_policy_it_had(tmp_path: Path, delay_seconds: float) -> None:
    """F13."""
    row = run_trial(tmp_path, delay_seconds=delay_seconds)
    assert row["steps_in_the_end"] == row["steps_when_killed"] + 3

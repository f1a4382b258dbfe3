"""benchmarks/operated_run.py with two layers: a gate and an operator take policies back."""

from __future__ import annotations

import sys

import pytest

from benchmarks.operated_run import CALM_AT, SLOW_AT, arguments_of, run
from rematic.memory import glibc


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or glibc.read_heap() is None,
    reason="the cap needs Linux with glibc 2.33",
)
@pytest.mark.timeout(300)
def test_a_slow_policy_and_one_that_an_operator_dislikes_go_back() -> None:
    found = run(arguments_of(["--layers", "2", "--tokens", "64", "--cap", "64MiB"]))
    assert found["ended_with"] == 0
    assert found["gates_missed"] == ["slowdown"]
    assert found["slow_steps"] == 8, "its probation"
    assert found["slow_until"] == SLOW_AT + 7
    assert (found["rolled_back_before"], found["policy_after"]) == (SLOW_AT + 8, "keep")
    assert found["request"] == "accepted"
    assert found["calm_until"] >= CALM_AT
    assert found["taken_back_before"] == found["calm_until"] + 1 == found["request_before"]
    assert found["policy_in_the_end"] == "keep"
    assert "accepted" in found["answer"] or "keep" in found["answer"]

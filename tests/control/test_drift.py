"""Gates on drift: what a policy was judged by changes under it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rematic.control.drift import STRETCH_STEPS, Drift, drifted
from rematic.control.gates import Gate
from rematic.control.goals import ControlRules, Goals
from rematic.control.observation import Observation
from tests.control.worlds import LADDER, Figures, World


def step(**figures: Any) -> Observation:
    given = {"step": 0, "tokens": 500, "length": 500, "seconds": 1.0, "policy": "own"}
    return Observation(**{**given, **figures})


def gates_of(first: dict[str, Any], then: dict[str, Any], retries: int = 0) -> dict[str, Gate]:
    """Gates of two stretches, each of equal steps; `retries` fail in the second."""
    drift, gates = Drift(), ()
    for number in range(2 * STRETCH_STEPS):
        late = number - STRETCH_STEPS
        drift, gates = drifted(
            drift, step(**(first if late < 0 else then)), int(0 <= late < retries)
        )
    return {gate.name: gate for gate in gates}


@pytest.mark.parametrize(
    ("tokens", "passed"), [(500, True), (999, True), (1001, False), (251, True), (249, False)]
)
def test_lengths_may_double_or_halve(tokens: int, passed: bool) -> None:
    gate = gates_of({}, {"tokens": tokens})["lengths"]
    assert gate.passed is passed
    assert gate.unit == "tokens"
    assert gate.measured == pytest.approx(tokens)
    assert gate.baseline == pytest.approx(500)
    assert gate.bound == pytest.approx(1000 if tokens >= 500 else 250)


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [(100, 109, True), (100, 111, False), (100, 85, False), (130, 155, True), (130, 165, False)],
)
def test_predictions_may_miss_twice_as_far_or_by_a_tenth(
    before: int, after: int, passed: bool
) -> None:
    gate = gates_of(
        {"predicted_peak_bytes": 100, "peak_bytes": before},
        {"predicted_peak_bytes": 100, "peak_bytes": after},
    )["predictions"]
    assert gate.passed is passed
    assert gate.measured == pytest.approx(abs(after / 100 - 1))


def test_a_sampled_peak_tells_of_predictions_only_where_it_is_above_them() -> None:
    """Without pressure memory is read at the ends of units, past what happens inside them."""
    exact = {"predicted_peak_bytes": 100, "peak_bytes": 100}
    low, high = (
        {"predicted_peak_bytes": 100, "peak_bytes": peak, "peak_is_sampled": True}
        for peak in (30, 130)
    )
    assert gates_of(exact, low)["predictions"].passed is None
    assert gates_of(low, exact)["predictions"].passed is None
    assert gates_of(exact, high)["predictions"].passed is False
    assert gates_of(exact, {**low, "peak_is_sampled": False})["predictions"].passed is False


def test_without_predictions_that_gate_is_not_judged() -> None:
    gate = gates_of({"peak_bytes": 5}, {"peak_bytes": 9, "predicted_peak_bytes": 1})["predictions"]
    assert (gate.passed, gate.bound) == (None, None)


@pytest.mark.parametrize(("retries", "passed"), [(0, True), (4, True), (5, False)])
def test_a_few_failed_allocations_are_no_drift(retries: int, passed: bool) -> None:
    gate = gates_of({}, {}, retries=retries)["retries"]
    assert (gate.passed, gate.measured, gate.baseline, gate.bound) == (passed, retries, 0, 4)


def slow_when_long(number: int, policy: str) -> dict[str, Any]:
    """From step 100 on batches are long, and `own` is slow on those."""
    tokens = 100 if number < 100 and number % 4 else 900
    slow = policy == "own" and number >= 100
    return {"tokens": tokens, "seconds": tokens * (5.0 if slow else 1.0)}


def own_policy(figures: Figures, steps: int, **rules: Any) -> World:
    world = World(figures, rules=ControlRules(ladder=LADDER, **rules)).run(10)
    world.switch("own")
    return world.run(steps)


def test_after_a_drift_a_policy_is_judged_again_and_may_go_back() -> None:
    world = own_policy(slow_when_long, 200)
    assert world.story() == [
        "17 own met its goals",
        "137 drift of lengths",
        "145 back to keep for slowdown",
    ]
    assert world.decisions[137].rule == "what own was judged by has changed (lengths)"
    assert world.state.quarantine == {("own", 10): "slowdown"}


def test_a_policy_that_is_still_good_stays() -> None:
    def figures(number: int, policy: str) -> dict[str, Any]:
        return {"tokens": 300 if number < 100 else 900}

    world = own_policy(figures, 400)
    assert world.story() == [
        "17 own met its goals",
        "201 drift of lengths",
        "209 own met its goals",
    ], "and the new lengths are the baseline"


@pytest.mark.parametrize("rules", [{"adapt": False}, {}], ids=["watching", "no policy before"])
def test_otherwise_it_is_told_only(rules: dict[str, Any]) -> None:
    def figures(number: int, policy: str) -> dict[str, Any]:
        return {"tokens": 300 if number < 70 else 900}

    world = World(figures, rules=ControlRules(ladder=LADDER, **rules)).run(200)
    assert world.story() == ["127 drift of lengths"]
    assert world.state.trial is None


def test_steps_are_armed_while_predictions_are_worse() -> None:
    def figures(number: int, policy: str) -> dict[str, Any]:
        peak = 2000 if number < 64 or number >= 128 else 2600
        return {"predicted_peak_bytes": 2000, "peak_bytes": peak}

    world = World(figures).run(260)
    assert world.story() == ["127 drift of predictions"]
    armed = [number for number, decision in enumerate(world.decisions) if decision.armed]
    assert armed == list(range(127, 191))


def test_random_lengths_of_one_kind_are_no_drift() -> None:
    """A tail whose longest batches are thirty times as long as the shortest."""
    draw = random.Random(0)
    tokens = [min(1050, int(draw.lognormvariate(5.6, 1.0))) + 1 for _ in range(3000)]
    assert World(lambda number, _: {"tokens": tokens[number]}).run(3000).story() == []


def test_the_planners_seconds_are_the_baseline_where_it_knows_them() -> None:
    """The policy before was slow itself: measured against it, the new one would pass."""

    def figures(number: int, policy: str) -> dict[str, Any]:
        seconds = {"keep": 900.0, "own": 1500.0}[policy]
        return {"tokens": 500, "seconds": seconds, "keep_seconds": 500.0}

    world = own_policy(figures, 20)
    assert world.story() == ["17 back to keep for slowdown"]
    (gate,) = [g for g in world.decisions[17].gates if g.name == "slowdown"]
    assert (gate.measured, gate.baseline, gate.bound) == (3.0, 1.0, 2.0)
    assert gate.unit == "seconds per token, the planner's as baseline"
    met = own_policy(figures, 20, goals=Goals(slowdown_max=3.1))
    assert met.story() == ["17 own met its goals"]
    unknown = own_policy(lambda n, p: {**figures(n, p), "keep_seconds": None}, 20)
    assert unknown.story() == ["17 own met its goals"]

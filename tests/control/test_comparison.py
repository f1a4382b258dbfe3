"""Which batches of a probation are run under two policies."""

from __future__ import annotations

from typing import Any

import pytest

from rematic.control.comparison import COMPARISONS_MAX, after_comparison, comparison_due
from rematic.control.controller import decide
from rematic.control.gates import Trial
from rematic.control.goals import ControlRules, Goals
from tests.control.worlds import LADDER, World

TRIAL = Trial("own", "keep", for_memory=False, failures_before=0)
WATCHED = Goals(gradient_tolerance=0.1)

NOT_DUE: dict[str, tuple[Trial | None, Goals, str, int]] = {
    "no probation": (None, WATCHED, "own", 100),
    "no goal that needs it": (TRIAL, Goals(), "own", 100),
    "another policy in force": (TRIAL, WATCHED, "keep", 100),
    "hardly longer": (TRIAL._replace(compared_tokens=51), WATCHED, "own", 100),
    "it cannot be done": (TRIAL._replace(num_failed_comparisons=3), WATCHED, "own", 100),
}


@pytest.mark.parametrize(("trial", "goals", "policy", "tokens"), NOT_DUE.values(), ids=NOT_DUE)
def test_most_batches_are_run_once(
    trial: Trial | None, goals: Goals, policy: str, tokens: int
) -> None:
    assert comparison_due(trial, goals, policy=policy, tokens=tokens) is None


def test_the_first_one_and_one_that_is_twice_as_long_are_run_twice() -> None:
    due = comparison_due(TRIAL, WATCHED, policy="own", tokens=100)
    assert due == ("keep", "no batch under own was compared yet")
    longer = after_comparison(TRIAL, "compared", tokens=50)
    due = comparison_due(longer, WATCHED, policy="own", tokens=100)
    assert due == ("keep", "twice as long as the longest one compared (50)")


@pytest.mark.parametrize("outcome", ["first run stands", "not compared"])
def test_after_some_failures_nothing_is_tried_any_more(outcome: Any) -> None:
    trial = TRIAL
    for _ in range(COMPARISONS_MAX):
        assert comparison_due(trial, WATCHED, policy="own", tokens=1) is not None
        trial = after_comparison(trial, outcome, tokens=1)
    assert comparison_due(trial, WATCHED, policy="own", tokens=1) is None
    assert after_comparison(trial, "compared", tokens=1).num_failed_comparisons == 0


def test_a_policy_that_follows_on_a_probation_is_compared_anew() -> None:
    """Also where the probation before it had compared batches as long, and was not over."""
    rules = ControlRules(ladder=LADDER, goals=Goals(loss_tolerance=0.1))
    figures = {"comparison": "compared", "loss_difference": 0.0}
    world = World(lambda step, policy: figures if step == 12 else {}, rules=rules).run(10)
    world.switch("own")
    world.run(3)
    assert world.state.trial is not None
    assert world.state.trial.compared_tokens == 500
    world.switch("another")
    world.run(1)
    assert world.state.trial is not None
    assert (world.state.trial.policy, world.state.trial.compared_tokens) == ("another", 0)


def test_a_run_under_the_policy_before_says_nothing_of_the_one_on_probation() -> None:
    """Neither its failures and bytes, nor its seconds."""
    world = World(lambda step, policy: {}).run(10)
    world.switch("own")
    world.run(3)
    state, decision = decide(
        world.state,
        world.observe()._replace(
            comparison="first run stands",
            is_previous=True,
            num_ooms=5,
            peak_bytes=None,
            seconds=1e9,
        ),
        world.rules,
    )
    assert decision.change == "none"
    assert state.trial is not None
    assert world.state.trial is not None
    assert state.trial.samples == world.state.trial.samples
    assert state.samples == world.state.samples
    assert (state.num_ooms, state.failures[-1]) == (5, 0)

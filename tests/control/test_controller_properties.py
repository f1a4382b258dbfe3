"""Whatever lengths, noise and statistics do, the controller stays within its bounds."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.control.controller import decide
from rematic.control.controller_plain import (
    controller_from_plain,
    controller_to_plain,
    rules_from_plain,
    rules_to_plain,
)
from rematic.control.goals import ControlRules, Goals, Pace
from tests.control.worlds import LADDER, World, cycle

FAST = ControlRules(ladder=LADDER, pace=Pace(probation_steps=3, cool_down_steps=4, window_steps=20))
STEPS = st.lists(
    st.fixed_dictionaries(
        {"tokens": st.integers(1, 2000)},
        optional={
            "seconds": st.floats(0.001, 1e4),
            "evicted_bytes": st.sampled_from([0, 500]),
            "num_failures": st.sampled_from([0, 1]),
            "reserved_bytes": st.sampled_from([None, 2000, 9900, 12_000]),
            "hole_bytes": st.sampled_from([None, 0, 4000]),
            "peak_bytes": st.sampled_from([None, 2000, 9900]),
            "limit_bytes": st.sampled_from([None, 3000, 10_000, 30_000]),
            "num_alloc_retries": st.integers(0, 300),
            "loss_difference": st.floats(0, 1),
            "gradient_difference": st.floats(0, 1),
        },
    ),
    min_size=1,
    max_size=150,
)


def run(steps: list[dict[str, Any]], rules: ControlRules, **world: Any) -> World:
    return World(lambda step, _: steps[step], rules=rules, **world).run(len(steps))


@settings(max_examples=150)
@given(STEPS, st.sampled_from([*LADDER, "planned"]), st.integers(0, 5))
def test_switches_are_bounded_whatever_comes(
    steps: list[dict[str, Any]], policy: str, switches_max: int
) -> None:
    rules = dataclasses.replace(FAST, goals=Goals(switches_max=switches_max))
    world = run(steps, rules, policy=policy)
    switched = [
        s.step for s, d in zip(world.seen, world.decisions, strict=True) if "sw" in d.change
    ]
    for start in range(len(steps)):
        window = [step for step in switched if start <= step < start + rules.pace.window_steps]
        assert len(window) <= switches_max
    rollbacks = sum(decision.change == "rollback" for decision in world.decisions)
    assert rollbacks <= len(switched), "a rollback takes back one switch"


@settings(max_examples=100)
@given(STEPS)
def test_every_change_is_one_step_up_or_back_to_where_it_came_from(
    steps: list[dict[str, Any]],
) -> None:
    world = run(steps, FAST)
    for seen, decision in zip(world.seen, world.decisions, strict=True):
        if decision.change != "none":
            assert decision.policy in LADDER
            assert decision.policy != seen.policy
            assert decision.rule
    changed = [d.change for d in world.decisions if d.change != "none"]
    assert len(changed) == len(world.stack) + 2 * changed.count("rollback")


@settings(max_examples=60)
@given(STEPS)
def test_a_pinned_policy_and_a_watching_controller_change_nothing(
    steps: list[dict[str, Any]],
) -> None:
    for world in (
        run(steps, FAST, pinned=True),
        run(steps, dataclasses.replace(FAST, adapt=False)),
    ):
        assert all(decision.change == "none" for decision in world.decisions)
        assert len([d for d in world.decisions if d.person]) <= 3, "each trouble is told once"


@settings(max_examples=60)
@given(STEPS, st.data())
def test_a_saved_state_goes_on_as_if_nothing_had_happened(
    steps: list[dict[str, Any]], data: st.DataObject
) -> None:
    world = run(steps, FAST)
    cut = data.draw(st.integers(0, len(steps)))
    state = World(lambda step, _: steps[step], rules=FAST).run(0).state
    for seen in world.seen[:cut]:
        state, _ = decide(state, seen, FAST)
    state = controller_from_plain(json.loads(json.dumps(controller_to_plain(state))))
    for seen, decision in zip(world.seen[cut:], world.decisions[cut:], strict=True):
        state, again = decide(state, seen, FAST)
        assert again == decision
    assert state == world.state


def test_the_worst_lengths_make_it_wait_ever_longer() -> None:
    """Batches that are short just until a lighter policy is back: switches grow as a logarithm."""
    rules = dataclasses.replace(FAST, goals=Goals(switches_max=1000, slowdown_max=1e9))

    def adversary(step: int, policy: str) -> dict[str, Any]:
        return {"tokens": 1200 if policy == "keep" else 300}

    steps = 5000
    world = World(adversary, rules=rules).run(steps)
    switched = sum(decision.change == "switch" for decision in world.decisions)
    assert 6 <= switched <= 2 * math.log2(steps / rules.pace.cool_down_steps) + 4


def test_alternating_lengths_are_no_reason_to_alternate() -> None:
    world = World(cycle([1200, 1200, 1200, 200, 200, 200])).run(2000)
    assert [d.policy for d in world.decisions if d.change != "none"] == ["selective"]


@given(st.booleans(), st.floats(0, 1), st.integers(1, 9))
def test_rules_are_plain(adapt: bool, headroom: float, steps: int) -> None:
    rules = ControlRules(
        goals=Goals(headroom_min=headroom),
        pace=Pace(probation_steps=steps),
        ladder=LADDER,
        adapt=adapt,
    )
    assert rules_from_plain(json.loads(json.dumps(rules_to_plain(rules)))) == rules

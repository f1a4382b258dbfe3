"""What the controller does in situations that occur, decision by decision."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from rematic.control.goals import ControlRules, Goals
from rematic.control.observation import Observation
from rematic.control.risk import TREND_STEPS, WARM_UP_STEPS
from tests.control.worlds import CAPACITY, LADDER, Figures, World, constant, cycle, lengths


def rare_long(step: int, policy: str) -> dict[str, Any]:
    """Every twelfth batch is too long for `keep`, and fits by evicting."""
    if step % 12 != 11:
        return {"tokens": 300}
    evicted = 2000 if policy == "keep" else 0
    return {"tokens": 1300, "evicted_bytes": evicted, "peak_bytes": 9400 if evicted else 7500}


def others_take_memory(step: int, policy: str) -> dict[str, Any]:
    """Another process holds half of the device for a while."""
    capacity = CAPACITY // 2 if 20 <= step < 80 else CAPACITY
    return {"tokens": 550, "capacity_bytes": capacity, "limit_bytes": capacity}


def fragmented(step: int, policy: str) -> dict[str, Any]:
    if step < 10:
        return {"tokens": 400}
    return {"tokens": 400, "reserved_bytes": 9500, "hole_bytes": 3000}


def fragmented_and_hurt(step: int, policy: str) -> dict[str, Any]:
    """The holes are such that allocations fail."""
    return {**fragmented(step, policy), "num_failures": int(step >= 10 and policy == "keep")}


def fragmented_once(step: int, policy: str) -> dict[str, Any]:
    return fragmented(step, policy) if step == 10 else {"tokens": 400}


def spilling(step: int, policy: str) -> dict[str, Any]:
    """From step 10 on `keep` takes more than there is, and the driver pages."""
    if step < 10 or policy != "keep":
        return {"tokens": 1000}
    return {"tokens": 1000, "in_use_bytes": 10_500, "seconds": 4000.0}


def retrying(step: int, policy: str) -> dict[str, Any]:
    """The allocator's retries rise in every step from step 10 on, under `keep`."""
    rising = max(0, step - 9) if policy == "keep" else 0
    return {"tokens": 600, "reserved_bytes": 9500, "num_alloc_retries": rising}


def growing_cache(step: int, policy: str) -> dict[str, Any]:
    """The allocator's retries rise in the first steps only."""
    return {"tokens": 600, "reserved_bytes": 9500, "num_alloc_retries": min(step, WARM_UP_STEPS)}


def retrying_a_while(step: int, policy: str) -> dict[str, Any]:
    """They go on to rise in two steps under the next policy: its sizes are new to the cache."""
    rising = min(max(0, step - 9), TREND_STEPS + 2)
    return {"tokens": 600, "reserved_bytes": 9500, "num_alloc_retries": rising}


def running_again(step: int, policy: str) -> dict[str, Any]:
    """Under `keep` steps run out, and fit as `recompute` when they run again."""
    again = int(policy == "keep")
    held = {"peak_bytes": 2400, "seconds": 780.0} if again else {}
    return {"tokens": 600, "num_failures": again, "num_step_retries": again, **held}


def noisy(step: int, policy: str) -> dict[str, Any]:
    """Step times that vary by a factor of three, and now and then of ten."""
    draw = random.Random(step)
    return {
        "tokens": 500,
        "seconds": 500 * draw.choice([1, 1, 1, 1.5, 3]) + 5000 * (step % 17 == 0),
    }


def useless(step: int, policy: str) -> dict[str, Any]:
    """`selective` needs as much as `keep`."""
    peaks = {"keep": 9900, "selective": 9900, "recompute": 5000}
    return {"tokens": 1000, "peak_bytes": peaks.get(policy, 3000)}


# Of the allocator's retries (F10): those of the first steps and an isolated one are no reason, and
# a trend is one for exactly one switch.
SCENARIOS: dict[str, tuple[Figures, int, list[str]]] = {
    "steady short batches": (constant(tokens=300), 200, []),
    "a rare long batch": (rare_long, 200, []),
    "growing lengths": (
        lambda step, policy: {"tokens": 500 + 10 * step},
        150,
        [
            "61 switch to selective",
            "69 selective met its goals",
            "127 switch to recompute",
            "135 recompute met its goals",
        ],
    ),
    "memory taken by another process": (
        others_take_memory,
        140,
        ["22 switch to selective", "30 selective met its goals", "80 switch to keep"],
    ),
    "fragmentation that a release cures": (fragmented_once, 60, ["10 release"]),
    "fragmentation that comes back and costs nothing": (
        fragmented,
        60,
        ["10 release", "20 release", "30 release"],
    ),
    "fragmentation that comes back": (
        fragmented_and_hurt,
        50,
        [
            "10 release",
            "20 release",
            "30 release",
            "33 switch to selective",
            "34 release",
            "41 selective met its goals",
            "44 release",
        ],
    ),
    "driver spill": (spilling, 40, ["12 switch to selective", "20 selective met its goals"]),
    "retries that rise": (retrying, 40, ["12 switch to selective", "20 selective met its goals"]),
    "retries that outlast the switch": (
        retrying_a_while,
        40,
        ["12 switch to selective", "20 selective met its goals"],
    ),
    "retries while the allocator still grows": (growing_cache, 60, []),
    "steps that run again as a whole": (
        running_again,
        60,
        ["2 switch to selective", "10 selective met its goals"],
    ),
    "one isolated retry": (lambda step, _: {"num_alloc_retries": int(step > 20)}, 60, []),
    "noisy step times": (noisy, 200, []),
    "missing statistics": (
        lambda step, policy: dict.fromkeys(
            ("limit_bytes", "peak_bytes", "in_use_bytes", "reserved_bytes", "capacity_bytes")
        ),
        60,
        [],
    ),
    "two phases with different optima": (
        lengths((40, 1200), (200, 300)),
        240,
        ["2 switch to selective", "10 selective met its goals", "100 switch to keep"],
    ),
    "a policy that does not help": (
        useless,
        60,
        ["2 switch to selective", "5 switch to recompute", "13 recompute met its goals"],
    ),
    "nothing is heavy enough": (
        constant(tokens=1000, peak_bytes=9900),
        60,
        [
            "2 switch to selective",
            "5 switch to recompute",
            "8 switch to recompute+offload",
            "16 back to recompute for relief",
            "26 ask",
        ],
    ),
}


@pytest.mark.parametrize(("figures", "steps", "story"), SCENARIOS.values(), ids=SCENARIOS.keys())
def test_a_scenario(figures: Figures, steps: int, story: list[str]) -> None:
    assert World(figures).run(steps).story() == story


def test_unknown_statistics_are_told_once() -> None:
    """F14."""
    figures = SCENARIOS["missing statistics"][0]
    assert World(figures).run(60).settled() == ["ok", "unknown"]


def test_a_step_after_trouble_is_armed_until_it_has_been_quiet() -> None:
    world = World(rare_long).run(20)
    assert [d.armed for d in world.decisions[10:17]] == [
        False,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_heap_has_nothing_to_release() -> None:
    rules = ControlRules(ladder=LADDER, can_release=False)
    assert World(fragmented, rules=rules).run(60).story() == []
    hurt = World(fragmented_and_hurt, rules=rules).run(60).story()
    assert hurt == ["12 switch to selective", "20 selective met its goals"]


def test_planned_is_never_left() -> None:
    """Inside it a heavier plan is taken step by step; a person hears of trouble that stays."""
    world = World(constant(tokens=1000, peak_bytes=9900), policy="planned").run(40)
    assert world.story() == ["9 ask"]
    assert "'planned' is not on the ladder" in world.decisions[9].person
    assert world.decisions[9].armed


def test_without_leave_it_only_watches() -> None:
    rules = ControlRules(ladder=LADDER, adapt=False)
    world = World(constant(tokens=1000, peak_bytes=9900), rules=rules).run(40)
    assert world.story() == ["9 ask"]
    assert world.policy == "keep"


def slow_policy(step: int, policy: str) -> dict[str, Any]:
    return {"tokens": 500, "seconds": 5000.0 if policy == "own" else 500.0}


def test_a_policy_that_is_too_slow_goes_back_with_its_numbers() -> None:
    world = World(slow_policy).run(10)
    world.switch("own")
    world.run(20)
    assert world.story() == ["17 back to keep for slowdown"]
    (gate,) = [g for g in world.decisions[17].gates if g.name == "slowdown"]
    assert (gate.measured, gate.baseline, gate.bound) == (10.0, 1.0, 2.0)
    assert world.state.quarantine == {("own", 9): "slowdown"}
    assert world.policy == "keep"


def test_gates_compare_equal_lengths_only() -> None:
    """Long batches take longer per token whatever the policy."""

    def figures(step: int, policy: str) -> dict[str, Any]:
        tokens = 100 if step < 10 else 900
        return {"tokens": tokens, "seconds": tokens * (9.0 if tokens > 500 else 1.0)}

    world = World(figures).run(10)
    world.switch("own")
    world.run(20)
    assert world.story() == ["17 own met its goals"]
    (gate,) = [g for g in world.decisions[17].gates if g.name == "slowdown"]
    assert gate.passed is None


def test_steps_too_short_to_be_timed_are_not_judged_by_time() -> None:
    def figures(step: int, policy: str) -> dict[str, Any]:
        return {"tokens": 500, "seconds": 0.009 if policy == "own" else 0.001}

    world = World(figures).run(10)
    world.switch("own")
    assert world.run(20).story() == ["17 own met its goals"]
    (gate,) = [g for g in world.decisions[17].gates if g.name == "slowdown"]
    assert (gate.passed, gate.measured) == (None, 0.009 / 500)


def test_failures_end_a_probation_at_once() -> None:
    world = World(lambda step, policy: {"num_failures": int(policy == "own")}).run(10)
    world.switch("own")
    world.run(10)
    assert world.story() == ["10 back to keep for ooms"]


def test_failures_that_were_there_before_do_not() -> None:
    world = World(constant(tokens=1200, num_failures=1, peak_bytes=9000)).run(30)
    assert "ooms" not in " ".join(world.story())


@pytest.mark.parametrize(
    ("goals", "figures", "missed", "step"),
    [
        (Goals(throughput_min=2.0), {"tokens": 500}, "throughput", 17),
        (Goals(headroom_min=0.2), {"tokens": 500, "peak_bytes": 8500}, "headroom", 17),
        (Goals(loss_tolerance=0.01), {"tokens": 500, "loss_difference": 0.02}, "loss", 10),
        (
            Goals(gradient_tolerance=0.01),
            {"tokens": 500, "loss_difference": 0.0, "gradient_difference": 0.02},
            "gradient",
            10,
        ),
    ],
    ids=["throughput", "headroom", "loss", "gradient"],
)
def test_each_goal_can_fail(goals: Goals, figures: dict[str, Any], missed: str, step: int) -> None:
    """What a comparison has shown is not waited for until the probation ends."""
    rules = ControlRules(ladder=LADDER, goals=goals)
    world = World(lambda step, policy: figures if policy == "own" else {"tokens": 500}, rules=rules)
    world.run(10).switch("own")
    assert world.run(20).story() == [f"{step} back to keep for {missed}"]
    goals = Goals(headroom_min=0.1, loss_tolerance=0.1, gradient_tolerance=0.1)
    met = dataclasses.replace(rules, goals=goals)
    world = World(lambda step, policy: figures if policy == "own" else {"tokens": 500}, rules=met)
    world.run(10).switch("own")
    assert world.run(20).story() == ["17 own met its goals"]


def test_an_operator_who_pins_in_the_middle_of_a_probation_ends_it() -> None:
    world = World(slow_policy).run(10)
    world.switch("own")
    world.run(3)
    world.pinned = True
    world.run(40)
    assert world.story() == []
    assert world.policy == "own"
    world.pinned = False
    assert world.run(40).story() == [], "nothing is on probation any more"


def test_a_pinned_policy_is_never_left() -> None:
    world = World(constant(tokens=1200, peak_bytes=9900), pinned=True).run(40)
    assert world.story() == ["9 ask"]
    assert "the policy is pinned" in world.decisions[9].person


def test_a_rollback_by_hand_is_no_switch_on_probation() -> None:
    world = World(slow_policy).run(10)
    world.switch("recompute")
    world.run(3)
    world.rollback()
    assert world.run(30).story() == []


def test_a_person_may_take_a_policy_out_of_quarantine() -> None:
    world = World(slow_policy).run(10)
    world.switch("own")
    world.run(20)
    world.switch("own")
    world.run(1)
    assert world.state.quarantine == {}


def test_a_change_that_never_comes_is_decided_again_after_a_window() -> None:
    """Somebody may refuse it: a host that is not at a boundary, a policy that loses precision."""
    world = World(constant(tokens=1000, peak_bytes=9900))
    asked: list[int] = []
    for _ in range(450):
        world.switch = lambda policy: asked.append(world.step - 1)  # type: ignore[method-assign]
        world.run(1)
    assert asked == [2, 202, 402]


def test_the_same_steps_give_the_same_decisions() -> None:
    first = World(rare_long).run(50)
    again = World(rare_long).run(50)
    assert first.decisions == again.decisions
    assert first.state == again.state
    assert all(isinstance(seen, Observation) for seen in first.seen)


def test_a_cycle_of_lengths_is_left_alone_when_it_fits() -> None:
    assert World(cycle([100, 900, 400, 1050])).run(300).story() == []

"""The first controller: pure, monotone in the budget, and it learns from what was measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.control import (
    Costs,
    Curve,
    StepDecision,
    StepOutcome,
    StepRequest,
    costs_from_plain,
    costs_to_plain,
    learn,
    plan_step,
)
from rematic.policy import Action, Keep, Recompute

K, R = Keep(), Recompute()
KIB = 1024


def _point(num_bytes: int, tokens: int = 100) -> Curve:
    return Curve(points=((tokens, num_bytes),))


KNOWN = Costs(
    kept=(("Block", _point(10 * KIB)),),
    unit_transient=_point(12 * KIB),
    head_transient=_point(5 * KIB),
    backward_transient=_point(14 * KIB),
    longest=100,
)


def _request(**changes: Any) -> StepRequest:
    fields: dict[str, Any] = {
        "tokens": 100,
        "length": 100,
        "unit_classes": ("Block",) * 4,
        "actions": (None,) * 4,
        "in_use_bytes": 100 * KIB,
        "pending_gradient_bytes": 0,
        "budget_bytes": 200 * KIB,
        "reserve": 0.0,
    }
    return StepRequest(**{**fields, **changes})


def _letters(decision: StepDecision) -> str:
    return "".join("K" if isinstance(action, Keep) else "R" for action in decision.plan.actions)


def test_units_that_never_ran_do_not_keep_others_from_being_kept() -> None:
    classes = ("Block", "Tower", "Block", "Tower")
    decision = plan_step(KNOWN, _request(unit_classes=classes))
    assert _letters(decision) == "KRKR"
    assert decision.unmeasured == (False, True, False, True)
    fixed = plan_step(KNOWN, _request(unit_classes=classes, actions=(None, R, None, K)))
    assert _letters(fixed) == "KRKK"
    assert fixed.unmeasured == (False,) * 4
    assert fixed.predicted_peak_bytes is None
    assert fixed.armed


# What is free, and what fits: four units of 10 KiB beside one at work (14) and the head (5).
# Kept i units from the end: max(10 (i - 1) + 14, 10 i + 5) KiB, and max(14, 5) with none.
FITS = [
    (10, "RRRR"),
    (14, "RRRR"),
    (15, "RRRK"),
    (24, "RRRK"),
    (25, "RRKK"),
    (34, "RRKK"),
    (35, "RKKK"),
    (44, "RKKK"),
    (45, "KKKK"),
    (99, "KKKK"),
]


@pytest.mark.parametrize(("free_kib", "plan"), FITS)
def test_as_many_of_the_last_units_are_kept_as_fit(free_kib: int, plan: str) -> None:
    decision = plan_step(KNOWN, _request(budget_bytes=(100 + free_kib) * KIB))
    assert _letters(decision) == plan
    kept = plan.count("K")
    highest = max(10 * (kept - 1) + 14, 10 * kept + 5) if kept else 14
    assert decision.predicted_peak_bytes == (100 + highest) * KIB
    assert f"{kept} of 4 units fit into {free_kib * KIB:,} bytes" in decision.reason


PLANS: dict[str, tuple[Costs, dict[str, Any], str]] = {
    "nothing measured": (Costs(), {}, "RRRR"),
    "no budget": (KNOWN, {"budget_bytes": None}, "RRRR"),
    "memory in use unknown": (KNOWN, {"in_use_bytes": None}, "RRRR"),
    "reserve": (KNOWN, {"budget_bytes": 145 * KIB, "reserve": 0.05}, "RKKK"),
    "margin": (
        dataclasses.replace(KNOWN, margin_bytes=1),
        {"budget_bytes": 145 * KIB},
        "RKKK",
    ),
    "in use beyond the limit": (KNOWN, {"in_use_bytes": 300 * KIB}, "RRRR"),
    "half as long": (KNOWN, {"tokens": 50, "budget_bytes": 123 * KIB}, "KKKK"),
    "a class that was never kept": (
        KNOWN,
        {"unit_classes": ("Block", "Block", "Other", "Block")},
        "KKRK",
    ),
    "one unit": (KNOWN, {"unit_classes": ("Block",), "actions": (None,)}, "K"),
    "the policy decides all": (KNOWN, {"actions": (R, K, R, K)}, "RKRK"),
    "the policy decides all, beyond the budget": (
        KNOWN,
        {"actions": (K, K, K, K), "budget_bytes": 1},
        "KKKK",
    ),
    "the policy decides some": (KNOWN, {"actions": (None, R, None, K)}, "KRKK"),
    "the policy keeps what the plan then cannot": (
        KNOWN,
        {"actions": (K, None, None, None), "budget_bytes": 126 * KIB},
        "KRRK",
    ),
    "the policy recomputes the last": (
        KNOWN,
        {"actions": (None, None, None, R), "budget_bytes": 134 * KIB},
        "RKKR",
    ),
}


@pytest.mark.parametrize(("costs", "changes", "plan"), PLANS.values(), ids=PLANS.keys())
def test_the_plan_of_a_step(costs: Costs, changes: dict[str, Any], plan: str) -> None:
    assert _letters(plan_step(costs, _request(**changes))) == plan


# (costs, changes, armed, watched)
ARMED: dict[str, tuple[Costs, dict[str, Any], bool, bool]] = {
    "nothing measured": (Costs(), {}, True, True),
    "far from the budget": (KNOWN, {}, False, False),
    "close to the budget": (KNOWN, {"budget_bytes": 146 * KIB}, True, False),
    "longer than ever": (KNOWN, {"tokens": 150, "length": 150}, True, True),
    "as many tokens in longer sequences": (KNOWN, {"length": 200}, True, True),
    "shorter": (KNOWN, {"tokens": 50, "length": 50}, False, False),
    "no budget": (KNOWN, {"budget_bytes": None}, False, False),
    "memory in use unknown": (KNOWN, {"in_use_bytes": None}, False, False),
    "backward never measured": (
        dataclasses.replace(KNOWN, backward_transient=Curve()),
        {},
        True,
        True,
    ),
    "a fixed policy that is not known to fit": (Costs(), {"actions": (K,) * 4}, True, True),
    "gradients fill the budget": (KNOWN, {"pending_gradient_bytes": 80 * KIB}, True, False),
}


@pytest.mark.parametrize(("costs", "changes", "armed", "watched"), ARMED.values(), ids=ARMED.keys())
def test_a_step_that_is_not_known_to_fit_is_armed(
    costs: Costs, changes: dict[str, Any], armed: bool, watched: bool
) -> None:
    decision = plan_step(costs, _request(**changes))
    assert (decision.armed, decision.watched) == (armed, watched)


# Everything kept needs max(10 x 3 + 14, 10 x 4 + 5) = 45 KiB beside the 100 in use: twice of it
# fits from 190 KiB on.
@pytest.mark.parametrize(
    ("costs", "changes", "expected"),
    [
        pytest.param(KNOWN, {"budget_bytes": 190 * KIB}, True, id="twice of it fits"),
        pytest.param(KNOWN, {"budget_bytes": 190 * KIB - 1}, False, id="not quite"),
        pytest.param(KNOWN, {"budget_bytes": None}, True, id="no limit"),
        pytest.param(KNOWN, {"budget_bytes": 2**40, "tokens": 50}, False, id="a new length"),
        pytest.param(
            KNOWN, {"budget_bytes": 2**40, "tokens": 50, "actions": (R,) * 4}, True, id="none kept"
        ),
        pytest.param(Costs(), {"budget_bytes": 2**40}, False, id="nothing known"),
        pytest.param(
            dataclasses.replace(KNOWN, surprised=True),
            {"budget_bytes": 2**40},
            False,
            id="after a surprise",
        ),
    ],
)
def test_a_step_with_room_to_spare_is_roomy(
    costs: Costs, changes: dict[str, Any], expected: bool
) -> None:
    assert plan_step(costs, _request(**changes)).roomy is expected


@pytest.mark.parametrize("surprising", [False, True])
def test_a_surprise_is_remembered_until_the_next_step(surprising: bool) -> None:
    before = dataclasses.replace(KNOWN, surprised=not surprising)
    outcome = _outcome(surprising=surprising)
    assert learn(before, outcome).surprised is surprising


def test_gradients_that_will_appear_are_part_of_the_prediction() -> None:
    decision = plan_step(KNOWN, _request(pending_gradient_bytes=60 * KIB))
    assert decision.predicted_peak_bytes == (100 + 60 + 14) * KIB


def test_what_the_rest_of_the_step_needs_falls_towards_the_head() -> None:
    decision = plan_step(KNOWN, _request(budget_bytes=135 * KIB))
    assert _letters(decision) == "RKKK"
    assert decision.needed_after_bytes == (35 * KIB, 25 * KIB, 15 * KIB, 5 * KIB)
    assert plan_step(Costs(), _request()).needed_after_bytes == (0, 0, 0, 0)


def test_a_fixed_policy_says_so() -> None:
    assert plan_step(KNOWN, _request(actions=(R,) * 4)).reason == (
        "every unit's action is given by the policy"
    )


# --- learning -------------------------------------------------------------------------------------


def _outcome(**changes: Any) -> StepOutcome:
    fields: dict[str, Any] = {
        "tokens": 100,
        "length": 50,
        "kept_bytes": (),
        "unit_transient_bytes": None,
        "head_transient_bytes": None,
        "backward_transient_bytes": None,
        "missing_bytes": 0,
    }
    return StepOutcome(**{**fields, **changes})


def test_a_watched_step_teaches_everything() -> None:
    costs = learn(
        Costs(),
        _outcome(
            kept_bytes=(("Block", 10), ("Other", 7), ("Block", 12)),
            unit_transient_bytes=1,
            head_transient_bytes=2,
            backward_transient_bytes=3,
        ),
    )
    assert costs == Costs(
        kept=(("Block", _point(12)), ("Other", _point(7))),
        unit_transient=_point(1),
        head_transient=_point(2),
        backward_transient=_point(3),
        longest=50,
    )
    assert costs.cover(tokens=100, length=50)
    assert not costs.cover(tokens=100, length=100)
    assert not costs.cover(tokens=200, length=50)


def test_an_unwatched_step_teaches_what_units_keep() -> None:
    costs = learn(KNOWN, _outcome(length=5000, kept_bytes=(("Block", 9 * KIB),)))
    assert costs == dataclasses.replace(KNOWN, kept=(("Block", _point(9 * KIB)),))


def test_a_step_without_backward_leaves_the_next_one_watched() -> None:
    costs = learn(Costs(), _outcome(unit_transient_bytes=1, head_transient_bytes=2))
    assert not costs.cover(tokens=100, length=50)
    assert plan_step(costs, _request()).watched


def test_a_shortfall_raises_the_margin_at_once_and_fades() -> None:
    costs = learn(KNOWN, _outcome(missing_bytes=800))
    assert costs.margin_bytes == 800
    margins = []
    for _ in range(60):
        costs = learn(costs, _outcome())
        margins.append(costs.margin_bytes)
    assert margins[0] == 700
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] == 0


# --- properties -----------------------------------------------------------------------------------

_bytes = st.integers(0, 1 << 36)
_curves = st.lists(st.tuples(st.integers(1, 9000), _bytes), max_size=3).map(
    lambda points: _learned(points)
)
_actions = st.sampled_from([None, None, K, R])
_classes = st.sampled_from(["Block", "Other"])


def _learned(points: list[tuple[int, int]]) -> Curve:
    curve = Curve()
    for point in points:
        curve = curve.updated(*point)
    return curve


costs_strategy = st.builds(
    Costs,
    kept=st.dictionaries(_classes, _curves).map(lambda kept: tuple(kept.items())),
    unit_transient=_curves,
    head_transient=_curves,
    backward_transient=_curves,
    longest=st.integers(0, 9000),
    margin_bytes=_bytes,
    surprised=st.booleans(),
)


@st.composite
def requests(draw: st.DrawFn) -> StepRequest:
    units = draw(st.lists(st.tuples(_classes, _actions), min_size=1, max_size=6))
    length = draw(st.integers(1, 9000))
    return StepRequest(
        tokens=length * draw(st.integers(1, 4)),
        length=length,
        unit_classes=tuple(name for name, _ in units),
        actions=tuple(action for _, action in units),
        in_use_bytes=draw(st.none() | _bytes),
        pending_gradient_bytes=draw(_bytes),
        budget_bytes=draw(st.none() | st.integers(1, 1 << 38)),
        reserve=draw(st.sampled_from([0.0, 0.05, 0.5])),
    )


@given(costs_strategy, requests(), st.integers(0, 1 << 38))
def test_more_budget_never_keeps_fewer_units(costs: Costs, request: StepRequest, more: int) -> None:
    if request.budget_bytes is None:
        return
    richer = dataclasses.replace(request, budget_bytes=request.budget_bytes + more)
    poor, rich = plan_step(costs, request).plan, plan_step(costs, richer).plan
    assert rich.num_kept >= poor.num_kept
    assert all(
        isinstance(after, Keep)
        for before, after in zip(poor.actions, rich.actions, strict=True)
        if isinstance(before, Keep)
    )


@given(costs_strategy, requests())
def test_a_decision_keeps_to_the_policy_and_is_the_same_twice(
    costs: Costs, request: StepRequest
) -> None:
    decision = plan_step(costs, request)
    assert decision == plan_step(costs, request)
    actions: tuple[Action, ...] = decision.plan.actions
    assert len(actions) == len(request.actions) == len(decision.needed_after_bytes)
    assert all(
        wanted is None or wanted == action
        for wanted, action in zip(request.actions, actions, strict=True)
    )
    assert all(needed >= 0 for needed in decision.needed_after_bytes)
    measured = {name for name, curve in costs.kept if curve.points}  # others are recomputed
    units = zip(actions, request.actions, request.unit_classes, strict=True)
    planned = [a for a, wanted, name in units if wanted is None and name in measured]
    assert planned == sorted(planned, key=lambda action: isinstance(action, Keep)), "the last ones"


@given(costs_strategy, requests())
def test_what_the_planner_keeps_is_predicted_to_fit(costs: Costs, request: StepRequest) -> None:
    decision = plan_step(costs, request)
    chose = any(
        wanted is None and isinstance(action, Keep)
        for wanted, action in zip(request.actions, decision.plan.actions, strict=True)
    )
    if chose:
        gradients = dataclasses.replace(request, pending_gradient_bytes=0)
        peak = plan_step(costs, gradients).predicted_peak_bytes
        if peak is None:  # a rule keeps units of a class that was never measured
            known = {name for name, curve in costs.kept if curve.points}
            pairs = zip(request.unit_classes, request.actions, strict=True)
            assert any(action == K and name not in known for name, action in pairs)
            return
        assert decision.limit_bytes is not None
        working = costs.working_set(request.tokens)
        assert working is not None
        at_the_end = (request.in_use_bytes or 0) + working.last_bytes
        assert peak <= max(decision.limit_bytes, at_the_end)


@given(costs_strategy)
def test_costs_survive_the_way_through_plain_types(costs: Costs) -> None:
    assert costs_from_plain(json.loads(json.dumps(costs_to_plain(costs)))) == costs


def test_deciding_imports_no_torch() -> None:
    """Contract 10. The package itself loads its public names on first use."""
    program = (
        "import sys, rematic.control, rematic.policy\n"
        "heavy = {'torch', 'numpy', 'lightning', 'transformers', 'rematic.session'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

"""Verdicts on memory: pressure, fragmentation, spill, and what is not known (F10, F11, F14)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.control.observation import Observation, observe
from rematic.control.risk import REMEDIES, TREND_STEPS, WARM_UP_STEPS, Risk, RiskState, assess

GIB = 1 << 30


def step(**figures: Any) -> Observation:
    """A quiet step on a device of 10 GiB under a budget of 8 GiB."""
    quiet: dict[str, Any] = {
        "step": 0,
        "tokens": 1000,
        "length": 1000,
        "seconds": 1.0,
        "policy": "keep",
        "limit_bytes": 8 * GIB,
        "peak_bytes": 4 * GIB,
        "in_use_bytes": 1 * GIB,
        "reserved_bytes": 5 * GIB,
        "hole_bytes": 0,
        "capacity_bytes": 10 * GIB,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    return Observation(**{**quiet, **figures})


def assess_all(*steps: Observation) -> list[Risk]:
    state, risks = RiskState(), []
    for seen in steps:
        state, risk = assess(state, seen, usual_seconds_per_token=0.001)
        risks.append(risk)
    return risks


def verdicts(*steps: Observation) -> list[str]:
    return [risk.verdict for risk in assess_all(*steps)]


CALM = [step() for _ in range(WARM_UP_STEPS)]

ONE_STEP: dict[str, tuple[dict[str, Any], str]] = {
    "quiet": ({}, "ok"),
    "peak at the limit": ({"peak_bytes": 8 * GIB}, "pressure"),
    "peak just below the threshold": ({"peak_bytes": int(0.969 * 8 * GIB)}, "ok"),
    "fitted by evicting": ({"evicted_bytes": 5}, "pressure"),
    "an op was run again": ({"num_failures": 1}, "pressure"),
    "the step ran again": ({"num_failures": 1, "num_step_retries": 1}, "pressure"),
    "full, no holes": (
        {"in_use_bytes": 9 * GIB, "reserved_bytes": int(9.5 * GIB), "peak_bytes": 9 * GIB},
        "pressure",
    ),
    "crowded, with holes": (
        {"reserved_bytes": int(9.5 * GIB), "hole_bytes": 3 * GIB},
        "fragmentation",
    ),
    "crowded, the rest is one cached block": ({"reserved_bytes": int(9.5 * GIB)}, "ok"),
    "holes, not crowded": ({"hole_bytes": 3 * GIB}, "ok"),
    "over capacity, at the usual speed": ({"reserved_bytes": 11 * GIB}, "ok"),
    "over capacity, slow": ({"reserved_bytes": 11 * GIB, "seconds": 2.0}, "spill"),
    "slow within capacity": ({"seconds": 9.0}, "ok"),
}


@pytest.mark.parametrize(("figures", "verdict"), ONE_STEP.values(), ids=ONE_STEP.keys())
def test_the_verdict_on_a_step(figures: dict[str, Any], verdict: str) -> None:
    assert verdicts(*CALM, step(**figures))[-1] == verdict


def test_verdicts_bring_their_numbers() -> None:
    (*_, risk) = assess_all(*CALM, step(reserved_bytes=11 * GIB, seconds=2.0))
    assert dict(risk.evidence) == {
        "held_bytes": 11 * GIB,
        "capacity_bytes": 10 * GIB,
        "seconds_per_token": 0.002,
        "usual_seconds_per_token": 0.001,
    }
    (risk,) = assess_all(step(peak_bytes=8 * GIB))
    assert risk.rule == "the peak is above 97% of the limit"
    assert dict(risk.evidence) == {"peak_bytes": 8 * GIB, "limit_bytes": 8 * GIB}


def retries(*counts: int) -> list[Observation]:
    return [step(num_alloc_retries=n, reserved_bytes=int(9.5 * GIB)) for n in counts]


def test_retries_in_the_first_steps_are_ignored() -> None:
    """F10: the allocator is still growing."""
    assert set(verdicts(*retries(*range(1, WARM_UP_STEPS + 1)))) == {"ok"}


def test_one_retry_is_no_trend_and_several_in_a_row_are() -> None:
    """F10."""
    calm = retries(*[0] * WARM_UP_STEPS)
    assert set(verdicts(*calm, *retries(1, 1, 1, 2, 2, 3, 3))) == {"ok"}
    found = verdicts(*calm, *retries(*range(1, TREND_STEPS + 1)))
    assert found[-2:] == ["ok", "pressure"]


def test_retries_with_room_to_grow_are_no_pressure() -> None:
    rising = [step(num_alloc_retries=n) for n in range(WARM_UP_STEPS + TREND_STEPS + 2)]
    assert set(verdicts(*rising)) == {"ok"}


MISSING: dict[str, dict[str, Any]] = {
    "nothing": dict.fromkeys(
        ("limit_bytes", "peak_bytes", "in_use_bytes", "reserved_bytes", "capacity_bytes")
    ),
    "no limit": {"limit_bytes": None, "capacity_bytes": None},
    "no bytes in use": {"peak_bytes": None, "in_use_bytes": None},
}


@pytest.mark.parametrize("figures", MISSING.values(), ids=MISSING.keys())
def test_missing_statistics_are_unknown(figures: dict[str, Any]) -> None:
    """F14."""
    assert verdicts(step(**figures)) == ["unknown"]


@pytest.mark.parametrize("figures", MISSING.values(), ids=MISSING.keys())
@pytest.mark.parametrize("step_retries", [0, 1])
def test_memory_that_has_run_out_needs_no_statistics(
    figures: dict[str, Any], step_retries: int
) -> None:
    """F14: what is done about errors stays."""
    failed = step(**figures, num_failures=1, num_step_retries=step_retries)
    assert verdicts(failed) == ["pressure"]


def test_some_statistics_are_enough_for_some_verdicts() -> None:
    rest = dict.fromkeys(
        ("reserved_bytes", "hole_bytes", "capacity_bytes", "num_alloc_retries", "num_ooms")
    )
    assert verdicts(step(**rest), step(**rest, peak_bytes=8 * GIB)) == ["ok", "pressure"]


NUMBERS = st.none() | st.integers(0, 100)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                **dict.fromkeys(("limit_bytes", "peak_bytes", "in_use_bytes"), NUMBERS),
                **dict.fromkeys(("reserved_bytes", "hole_bytes", "capacity_bytes"), NUMBERS),
                "num_alloc_retries": NUMBERS,
                "tokens": st.integers(0, 100),
                "length": st.integers(0, 100),
                "seconds": st.floats(0, 10),
            }
        ),
        max_size=12,
    )
)
def test_no_figures_break_it(figures: list[dict[str, Any]]) -> None:
    """F14: never a division by zero, whatever the statistics say."""
    steps = [step(**one) for one in figures]
    risks = assess_all(*steps)
    assert all(risk.verdict in REMEDIES for risk in risks)
    assert risks == assess_all(*steps), "the same steps give the same verdicts"


def test_a_step_event_is_read() -> None:
    event = {
        "step": 7,
        "tokens": 20,
        "length": 10,
        "seconds": 0.5,
        "policy": "keep",
        "budget_bytes": 900,
        "peak_bytes": 800,
        "evicted_bytes": 50,
        "op_retries": 1,
        "step_retries": 2,
        "unit_retries": 2,
        "after": {"allocated_bytes": 100, "capacity_bytes": 850, "num_ooms": 3},
    }
    seen = observe(event)
    assert (seen.limit_bytes, seen.demand_bytes) == (850, 850)
    assert (seen.num_failures, seen.num_step_retries) == (5, 2)
    assert (seen.in_use_bytes, seen.reserved_bytes, seen.num_ooms) == (100, None, 3)
    assert observe({**event, "after": {}}).limit_bytes == 900
    assert observe({**event, "budget_bytes": None}).limit_bytes == 850
    assert observe({**event, "after": {"capacity_bytes": 0}}).limit_bytes == 900, "unreadable"

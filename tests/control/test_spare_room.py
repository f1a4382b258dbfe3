"""Which updates of an optimizer need no cover, from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.control import fits_update
from rematic.control.spare_room import UPDATE_FACTOR

ROOMY: dict[str, Any] = {
    "in_use_bytes": 100,
    "parameter_bytes": 10,
    "budget_bytes": 1000,
    "capacity_bytes": 1000,
    "reserve": 0.1,
}


def test_an_update_with_room_needs_no_cover() -> None:
    assert fits_update(**ROOMY)


@pytest.mark.parametrize(
    "change",
    [
        {"in_use_bytes": None},
        {"budget_bytes": None},
        {"capacity_bytes": None},  # a budget alone is what somebody wrote down
        {"in_use_bytes": 821},
        {"parameter_bytes": 101},
        {"budget_bytes": 199},
        {"capacity_bytes": 199},  # another program holds the rest
        {"reserve": 0.9},
    ],
    ids=str,
)
def test_an_update_without_it_or_of_which_nothing_is_known_is_covered(
    change: dict[str, Any],
) -> None:
    assert not fits_update(**{**ROOMY, **change})


@given(
    in_use=st.integers(0, 1 << 40),
    parameters=st.integers(0, 1 << 40),
    budget=st.integers(0, 1 << 42),
    capacity=st.integers(0, 1 << 42),
)
def test_what_fits_is_below_both_limits(
    in_use: int, parameters: int, budget: int, capacity: int
) -> None:
    fits = fits_update(
        in_use_bytes=in_use,
        parameter_bytes=parameters,
        budget_bytes=budget,
        capacity_bytes=capacity,
        reserve=0.0,
    )
    needed = in_use + UPDATE_FACTOR * parameters
    assert fits == (needed <= budget and needed <= capacity)

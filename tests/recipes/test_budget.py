from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.recipes.budget import Budget, parse_budget

_NO_SIZE = "a fraction of the device above 0 and at most 1, such as 0.9 or 90%, or auto"


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("700MiB", "absolute", 700 * 2**20),
        ("1.5 GiB", "absolute", 3 * 2**29),
        ("20GB", "absolute", 20 * 10**9),
        (2, "absolute", 2),
        ("1234", "absolute", 1234),
        ("1 B", "absolute", 1),
        (0.9, "fraction", 0.9),
        (1.0, "fraction", 1.0),
        ("0.9", "fraction", 0.9),
        ("1.0", "fraction", 1.0),
        ("90%", "fraction", 0.9),
        ("100 %", "fraction", 1.0),
        ("2.5%", "fraction", 0.025),
        ("auto", "auto", None),
        (" auto ", "auto", None),
    ],
)
def test_what_a_person_writes(written: int | float | str, kind: str, value: float | None) -> None:
    budget = parse_budget(written)
    assert (budget.kind, budget.value) == (kind, value)
    assert type(budget.value) is type(value)


@pytest.mark.parametrize(
    ("written", "start"),
    [
        (0.0, "budget 0.0 is not a fraction of a device; "),
        (1.5, "budget 1.5 is not a fraction of a device; "),
        (math.nan, "budget nan is not a fraction of a device; "),
        ("120%", "budget 120% is not a fraction of a device; "),
        ("0%", "budget 0% is not a fraction of a device; "),
        (True, "budget is true; "),
        (None, "budget is null; "),
        ("Auto", "budget 'Auto': not a byte size: 'Auto'; "),
        ("", "budget '': not a byte size: ''; "),
        ("-3GiB", "budget '-3GiB': not a byte size: '-3GiB'; "),
        ("5 bananas", "budget '5 bananas': unknown unit 'bananas' in the byte size '5 bananas'; "),
        ("20G", "budget '20G': unknown unit 'G' in the byte size '20G'; write '20GiB' (powers of"),
        ("x%", "budget 'x%': not a byte size: 'x%'; "),
        (0, "budget 0: not a usable byte size: 0 is 0 bytes; "),
        (-5, "budget -5: not a usable byte size: -5 is -5 bytes; "),
    ],
)
def test_what_is_no_budget(written: object, start: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(start)}") as caught:
        parse_budget(written)  # type: ignore[arg-type]
    assert str(caught.value).endswith(_NO_SIZE)


@pytest.mark.parametrize("written", [1, "1", " 1 "])
def test_one_is_refused_since_it_has_two_meanings(written: int | str) -> None:
    message = (
        "budget 1 could mean one byte or the whole device; write 1.0 or 100% for the whole device,"
        " a size such as 20GiB for bytes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_budget(written)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("absolute", None),
        ("absolute", 0.5),
        ("absolute", 0),
        ("absolute", True),
        ("fraction", 1),
        ("fraction", 1.1),
        ("auto", 1),
        ("share", 0.5),
    ],
)
def test_a_budget_whose_kind_and_value_disagree(kind: str, value: float | None) -> None:
    with pytest.raises(
        ValueError, match=f"^a budget of kind '{kind}' with value {value}; expected"
    ):
        Budget(kind=kind, value=value)  # type: ignore[arg-type]


@given(
    st.builds(Budget, kind=st.just("absolute"), value=st.integers(1, 2**60))
    | st.builds(Budget, kind=st.just("fraction"), value=st.floats(1e-300, 1.0))
    | st.just(Budget())
)
def test_a_budget_is_written_as_it_is_read(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget

"""Groups B, C and E where several ranks train together."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What each of two ranks printed."""
    return run_ranks("tests.cases.several_ranks", seconds=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("B1: as the mean of the ranks", id="case_b1_unused_parameters"),
        pytest.param("B2: as the mean of the ranks", id="case_b2_layers_called_twice"),
        pytest.param("C4: both orders", id="case_c4_casts_of_fully_shard"),
        pytest.param("E3: sharded and without old gradients", id="case_e3_nothing_left_gathered"),
    ],
)
def test_on_two_ranks(said: list[str], line: str) -> None:
    assert all(line in output.splitlines() for output in said)

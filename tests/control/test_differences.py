from __future__ import annotations

import math

import pytest

from rematic.control import gradient_difference, relative_difference
from rematic.control.differences import LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 2.5, 0.25),
        (-2.0, -1.0, 0.5),
        (math.nan, math.nan, 0.0),
        (2.0, math.nan, LARGEST_DIFFERENCE),
        (math.inf, 2.0, LARGEST_DIFFERENCE),
        (0.0, 1.0, LARGEST_DIFFERENCE),
    ],
)
def test_losses(before: float, after: float, expected: float) -> None:
    assert relative_difference(before, after) == expected


def sums(one: list[float], right: list[float]) -> dict[str, float]:
    return {
        "squares": math.fsum(a * a for a in one),
        "previous_squares": math.fsum(b * b for b in right),
        "products": math.fsum(a * b for a, b in zip(one, right, strict=True)),
        "squared_distance": math.fsum((a - b) ** 2 for a, b in zip(one, right, strict=True)),
    }


@pytest.mark.parametrize(
    ("one", "right", "norm", "cosine", "difference"),
    [
        ([3.0, 4.0], [3.0, 4.0], 5.0, 1.0, 0.0),
        ([-3.0, -4.0], [3.0, 4.0], 5.0, -1.0, 2.0),
        ([4.0, -3.0], [3.0, 4.0], 5.0, 0.0, math.sqrt(2.0)),
        ([1.5, 2.0], [3.0, 4.0], 2.5, 1.0, 0.5),
        ([0.0, 0.0], [3.0, 4.0], 0.0, None, 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, None, 0.0),
        ([1.0, 0.0], [0.0, 0.0], 1.0, None, LARGEST_DIFFERENCE),
    ],
    ids=["same", "opposite", "across", "half", "gone", "none", "from nothing"],
)
def test_gradients(
    one: list[float], right: list[float], norm: float, cosine: float | None, difference: float
) -> None:
    found = gradient_difference(**sums(one, right))
    assert found.norm == pytest.approx(norm)
    assert found.previous_norm == pytest.approx(math.hypot(*right))
    assert found.cosine == (None if cosine is None else pytest.approx(cosine))
    assert found.difference == pytest.approx(difference)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_far_from_any(wrong: float) -> None:
    found = gradient_difference(**sums([wrong, 0.0], [3.0, 4.0]))
    assert (found.cosine, found.difference) == (None, LARGEST_DIFFERENCE)

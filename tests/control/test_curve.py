"""Bytes as a function of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.control import Curve

sizes = st.integers(1, 1 << 40)
tokens = st.integers(1, 1 << 20)


def _curve(*points: tuple[int, int]) -> Curve:
    curve = Curve()
    for point in points:
        curve = curve.updated(*point)
    return curve


AT: dict[str, tuple[Curve, int, int | None]] = {
    "nothing measured": (Curve(), 100, None),
    "the point itself": (_curve((100, 50)), 100, 50),
    "below the first, in proportion": (_curve((100, 50)), 10, 5),
    "rounded up": (_curve((100, 50)), 11, 6),
    "above the only one, in proportion": (_curve((100, 50)), 200, 100),
    "between two, on the line": (_curve((100, 50), (200, 150)), 150, 100),
    "above, rising faster than in proportion": (_curve((100, 100), (200, 400)), 300, 700),
    "above, rising slower: in proportion": (_curve((100, 100), (200, 110)), 400, 220),
    "after a batch without tokens": (_curve((0, 10)), 5, 50),
    "for a batch without tokens": (_curve((100, 50)), 0, 0),
    "exactly on an inner point": (_curve((100, 1), (200, 2), (400, 9)), 200, 2),
}


@pytest.mark.parametrize(("curve", "at", "expected"), AT.values(), ids=AT.keys())
def test_values_between_and_beyond_the_measurements(
    curve: Curve, at: int, expected: int | None
) -> None:
    assert curve.at(at) == expected


def test_the_newest_of_nearly_equal_lengths_wins() -> None:
    curve = _curve((1000, 5), (1010, 7), (1005, 6))
    assert curve.points == ((1005, 6),)
    assert curve.updated(2000, 1).points == ((1005, 6), (2000, 1))


COVERS = {"nothing": (Curve(), 1, False), "same": (_curve((100, 1)), 100, True)} | {
    "shorter": (_curve((100, 1)), 3, True),
    "nearly as long": (_curve((1000, 1)), 1020, True),
    "longer": (_curve((1000, 1)), 1200, False),
    "longer than the longest": (_curve((1000, 1), (10, 1)), 1200, False),
}


@pytest.mark.parametrize(("curve", "length", "expected"), COVERS.values(), ids=COVERS.keys())
def test_what_a_curve_covers(curve: Curve, length: int, expected: bool) -> None:
    assert curve.covers(length) is expected


@given(st.lists(st.tuples(tokens, sizes), min_size=1, max_size=8), tokens)
def test_a_curve_is_never_below_the_smaller_neighbour(
    points: list[tuple[int, int]], at: int
) -> None:
    curve = _curve(*points)
    value = curve.at(at)
    assert value is not None
    measured = dict(curve.points)
    if at in measured:
        assert value == measured[at]
    elif curve.points[0][0] < at < curve.points[-1][0]:
        lower = max(p for p in curve.points if p[0] < at)
        upper = min(p for p in curve.points if p[0] > at)
        assert min(lower[1], upper[1]) <= value <= max(lower[1], upper[1])


@given(tokens, sizes, tokens, tokens)
def test_one_measurement_is_monotone_in_the_length(
    measured: int, num_bytes: int, one: int, other: int
) -> None:
    curve = _curve((measured, num_bytes))
    low, high = sorted((one, other))
    below, above = curve.at(low), curve.at(high)
    assert below is not None
    assert above is not None
    assert below <= above


@given(st.lists(st.tuples(tokens, sizes), min_size=1, max_size=8), tokens, tokens)
def test_beyond_the_longest_bytes_grow_at_least_in_proportion(
    points: list[tuple[int, int]], extra: int, more: int
) -> None:
    curve = _curve(*points)
    longest, num_bytes = curve.points[-1]
    value = curve.at(longest + extra)
    further = curve.at(longest + extra + more)
    assert value is not None
    assert further is not None
    assert value >= num_bytes * (longest + extra) // longest
    assert further >= value

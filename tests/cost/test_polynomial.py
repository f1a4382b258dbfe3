from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.cost.polynomial import Envelope, Grid, Polynomial

GRID = Grid(batches=(2, 3), lengths=(32, 64, 96))
POWERS = [(i, j) for i in (0, 1) for j in (0, 1, 2)]
coefficients = st.lists(st.integers(-(2**40), 2**40), min_size=6, max_size=6)


@given(coefficients)
@settings(max_examples=50)
def test_a_fit_finds_the_polynomial_again(numbers):
    wanted = Polynomial.of(dict(zip(POWERS, numbers, strict=True)))
    assert GRID.fit([wanted(batch, length) for batch, length in GRID.points]) == wanted


def test_points_go_through_the_lengths_first():
    assert GRID.points[:4] == ((2, 32), (2, 64), (2, 96), (3, 32))


def test_halves_are_exact():
    half = Polynomial.of({(0, 2): Fraction(1, 2), (0, 1): Fraction(1, 2)})
    assert GRID.fit([half(b, n) for b, n in GRID.points]) == half
    assert half(7, 3) == 6


def test_sum_and_difference():
    left, right = Polynomial.of({(0, 0): 5, (1, 1): 2}), Polynomial.of({(1, 1): 2})
    assert left - right == Polynomial.constant(5)
    assert (left + right)(2, 3) == 5 + 4 * 6


@given(st.lists(coefficients, min_size=1, max_size=6), st.integers(1, 64), st.integers(1, 2**20))
@settings(max_examples=50)
def test_an_envelope_loses_no_peak(several, batch, length):
    polynomials = [Polynomial.of(dict(zip(POWERS, numbers, strict=True))) for numbers in several]
    highest = max(0, *(p(batch, length) for p in polynomials), 0)
    assert Envelope.over(polynomials)(batch, length) == highest


def test_another_event_is_the_highest_at_another_length():
    linear, quadratic = Polynomial.of({(0, 1): 1000}), Polynomial.of({(0, 2): 1})
    envelope = Envelope.over([linear, quadratic, Polynomial.of({(0, 1): 999})])
    assert len(envelope.candidates) == 2
    assert [envelope(1, n) for n in (10, 10_000)] == [10_000, 100_000_000]
    assert envelope.degree == 2


@pytest.mark.parametrize("lengths", [(), (64, 32), (32, 32), (0, 1)])
def test_a_grid_refuses_disorder(lengths):
    with pytest.raises(ValueError, match=r"lengths are .*: expected numbers from 1, each once"):
        Grid(batches=(1,), lengths=lengths)

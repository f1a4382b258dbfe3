"""Polynomials in batch size and length: what live bytes are, event by event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The batch sizes and lengths at which something was measured.

    Two batch sizes tell what grows with the batch, three lengths what grows with the length and
    with its square. With one batch size the polynomials hold for that one alone.
    """

    batches: tuple[int, ...]
    """Batch sizes, ascending."""

    lengths: tuple[int, ...]
    """Lengths in tokens, ascending."""

    def __post_init__(self) -> None:
        for name, values in (("batches", self.batches), ("lengths", self.lengths)):
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(
                    f"{name} are {values}: expected numbers from 1, each once and ascending."
                )

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """Every (batch, length), the lengths of the first batch size first."""
        return tuple((batch, length) for batch in self.batches for length in self.lengths)

    @cached_property
    def _weights(self) -> tuple[tuple[tuple[Fraction, ...], ...], tuple[tuple[Fraction, ...], ...]]:
        return _inverse(self.batches), _inverse(self.lengths)

    def fit(self, values: Sequence[int]) -> Polynomial:
        """Returns the polynomial through the values at `points`, exactly.

        Args:
            values: One for each point, in the order of `points`.
        """
        by_batch, by_length = self._weights
        width = len(self.lengths)
        rows = [values[i * width : (i + 1) * width] for i in range(len(self.batches))]
        in_length = [[_dot(weights, row) for weights in by_length] for row in rows]
        terms: dict[tuple[int, int], int | Fraction] = {}
        for power in range(width):
            column = [row[power] for row in in_length]
            if not any(column):
                continue
            for i, weights in enumerate(by_batch):
                coefficient = _dot(weights, column)
                if coefficient:
                    terms[i, power] = coefficient
        return Polynomial.of(terms)


@dataclass(frozen=True)
class Polynomial:
    """A sum of terms c * batch**i * length**j."""

    terms: tuple[tuple[int, int, int | Fraction], ...]
    """(i, j, c), ordered, without zeros."""

    @classmethod
    def of(cls, terms: Mapping[tuple[int, int], int | Fraction]) -> Polynomial:
        """Makes one from coefficients by (power of batch, power of length)."""
        return cls(tuple((i, j, _plain(c)) for (i, j), c in sorted(terms.items()) if c))

    @classmethod
    def constant(cls, value: int) -> Polynomial:
        """Makes one that has the same value everywhere."""
        return cls.of({(0, 0): value})

    def __call__(self, batch: int, length: int) -> int:
        """Returns the value, rounded to a whole number."""
        value: int | Fraction = 0
        for i, j, c in self.terms:
            value += c * batch**i * length**j
        return round(value)

    def __add__(self, other: Polynomial) -> Polynomial:
        """Returns the sum."""
        return self._combined(other, 1)

    def __sub__(self, other: Polynomial) -> Polynomial:
        """Returns the difference."""
        return self._combined(other, -1)

    def times(self, factor: int) -> Polynomial:
        """Returns the product with a number."""
        return Polynomial.of({(i, j): factor * c for i, j, c in self.terms})

    def _combined(self, other: Polynomial, sign: int) -> Polynomial:
        terms = {(i, j): c for i, j, c in self.terms}
        for i, j, c in other.terms:
            terms[i, j] = terms.get((i, j), 0) + sign * c
        return Polynomial.of(terms)

    @property
    def degree(self) -> int:
        """The highest power of the length."""
        return max((j for _, j, _ in self.terms), default=0)

    def never_above(self, other: Polynomial) -> bool:
        """Returns whether no coefficient is larger, so that no value from 1 on is."""
        mine = {(i, j): c for i, j, c in self.terms}
        its = {(i, j): c for i, j, c in other.terms}
        return all(mine.get(key, 0) <= its.get(key, 0) for key in mine.keys() | its.keys())


@dataclass(frozen=True)
class Envelope:
    """The largest of several polynomials: the peak of an interval over its events.

    The maximum is no polynomial itself and is never fitted: at another length another event is the
    highest one.
    """

    candidates: tuple[Polynomial, ...]
    """Those that may be the largest somewhere; 0 is always among what is compared."""

    @classmethod
    def over(cls, polynomials: Iterable[Polynomial]) -> Envelope:
        """Makes one, leaving out what lies under another everywhere."""
        distinct = dict.fromkeys(polynomials)
        highest_first = sorted(distinct, key=lambda p: p(4, 4096), reverse=True)
        kept: list[Polynomial] = []
        for polynomial in highest_first:
            if not any(polynomial.never_above(other) for other in kept):
                kept.append(polynomial)
        return cls(tuple(kept))

    @property
    def degree(self) -> int:
        """The highest power of the length in any of them."""
        return max((p.degree for p in self.candidates), default=0)

    def plus(self, num_bytes: int) -> Envelope:
        """Returns it with so much more everywhere."""
        added = Polynomial.constant(num_bytes)
        return Envelope((*(candidate + added for candidate in self.candidates), added))

    def __call__(self, batch: int, length: int) -> int:
        """Returns the largest value, at least 0."""
        return max([0, *(p(batch, length) for p in self.candidates)])


def _plain(value: int | Fraction) -> int | Fraction:
    # whole numbers, which nearly all are, are ten times as fast
    return value.numerator if value.denominator == 1 else value


def _inverse(points: tuple[int, ...]) -> tuple[tuple[Fraction, ...], ...]:
    """Returns, for each power, the weights of the values at `points` in its coefficient.

    Lagrange's basis: the polynomial that is 1 at one point and 0 at the others, for every point.
    """
    columns: list[list[Fraction]] = []
    for point in points:
        basis = [Fraction(1)]
        for other in points:
            if other != point:
                basis = _times(basis, (Fraction(-other, point - other), Fraction(1, point - other)))
        columns.append(basis)
    return tuple(tuple(column[power] for column in columns) for power in range(len(points)))


def _times(polynomial: list[Fraction], factor: tuple[Fraction, Fraction]) -> list[Fraction]:
    product = [Fraction(0)] * (len(polynomial) + 1)
    for power, coefficient in enumerate(polynomial):
        product[power] += coefficient * factor[0]
        product[power + 1] += coefficient * factor[1]
    return product


def _dot(weights: Sequence[Fraction], values: Sequence[Fraction | int]) -> Fraction:
    return sum((w * v for w, v in zip(weights, values, strict=True) if v), Fraction(0))

"""How far a batch's loss and gradients under one policy are from those under another. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

LARGEST_DIFFERENCE = 1e9
"""Stands for what cannot be compared, such as a loss that is not a number."""


class GradientDifference(NamedTuple):
    """Two gradients of all parameters together, compared."""

    norm: float
    """Euclidean norm of the one."""
    previous_norm: float
    """Euclidean norm of the other, which counts as right."""
    cosine: float | None
    """Cosine of the angle between them; None if one is zero or not finite."""
    difference: float
    """Norm of what they differ by, as a multiple of `previous_norm`."""


def relative_difference(before: float, after: float) -> float:
    """Returns by what share of the first number the second differs from it."""
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    if not (math.isfinite(before) and math.isfinite(after)):
        return LARGEST_DIFFERENCE
    return min(abs(after - before) / max(abs(before), 1e-12), LARGEST_DIFFERENCE)


def gradient_difference(
    *, squares: float, previous_squares: float, products: float, squared_distance: float
) -> GradientDifference:
    """Compares two gradients by four sums over their elements.

    Args:
        squares: Of the squares of the one.
        previous_squares: Of the squares of the other, which counts as right.
        products: Of the products of both.
        squared_distance: Of the squares of their differences.
    """
    norm, previous = _root(squares), _root(previous_squares)
    known = all(map(math.isfinite, (squares, previous_squares, products, squared_distance)))
    if not known:
        return GradientDifference(norm, previous, None, LARGEST_DIFFERENCE)
    if previous == 0:
        return GradientDifference(norm, previous, None, LARGEST_DIFFERENCE if norm else 0.0)
    cosine = max(-1.0, min(1.0, products / (norm * previous))) if norm else None
    difference = min(_root(squared_distance) / previous, LARGEST_DIFFERENCE)
    return GradientDifference(norm, previous, cosine, difference)


def _root(squares: float) -> float:
    return math.sqrt(squares) if squares >= 0 else squares  # not a number, or infinite

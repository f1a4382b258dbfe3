"""The unit in which the dynamic program counts bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rematic.planner.problem import Option

MIN_QUANTA = 4096
"""Fewest quanta between the plan that keeps least and the one that keeps most."""

MAX_WORK = 2**21
"""Most quanta times units: what tens of milliseconds are enough for."""

_MAX_CANDIDATES = 512
_INTEGERS_END = 2**62
"""From here on NumPy's integers do not hold what is rounded up: nobody minds what is lost."""


def quantum_bytes(units: Sequence[tuple[Option, ...]]) -> int:
    """Returns the size of a quantum: the same for every budget, and one that rounds little.

    Plans near "keep all" suffer most from rounding, since little time is lost there. So a quantum
    divides what the most common class keeps at most, and of the divisors that give at least 4,096
    quanta in all, and no more than there is time for, it is the one that rounds up least what plans
    mix: the options on the convex hull of bytes and seconds.

    Args:
        units: Options of each unit.
    """
    counts: dict[tuple[Option, ...], int] = {}
    for options in units:
        counts[options] = counts.get(options, 0) + 1
    span = sum(count * _extra(options) for options, count in counts.items())
    if span <= MIN_QUANTA:
        return 1
    if span >= _INTEGERS_END:
        return -(-span // MIN_QUANTA)
    whole = max(_extra(options) * count for options, count in counts.items())
    common = next(_extra(o) for o, count in counts.items() if _extra(o) * count == whole)
    fewest, most = (
        -(-common * MIN_QUANTA // span),
        max(1, common * max(MIN_QUANTA, MAX_WORK // len(units)) // span),
    )
    parts = np.unique(np.linspace(fewest, max(fewest, most), _MAX_CANDIDATES).astype(np.int64))
    sizes = -(-common // parts)
    lost = np.zeros(len(sizes))
    for options, count in counts.items():
        lost += count * _lost_share(hull(options), sizes)
    return max(1, int(sizes[int(np.argmin(lost))]))


def hull(options: Sequence[Option]) -> list[tuple[int, float]]:
    """Returns what mixes of many units are made of, by rising bytes and falling seconds.

    Args:
        options: Options of one unit.

    Returns:
        Bytes kept beyond the least, and seconds, at each corner of the convex hull.
    """
    least = min(option.kept_bytes for option in options)
    corners: list[tuple[int, float]] = []
    for kept, seconds in sorted((o.kept_bytes - least, o.seconds) for o in options):
        if corners and seconds >= corners[-1][1]:
            continue
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], (kept, seconds)):
            corners.pop()
        corners.append((kept, seconds))
    return corners


def _lost_share(
    corners: Sequence[tuple[int, float]], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns, for each size, the share of the time that rounding loses, summed over the corners.

    The bytes by which a corner is rounded up, at the price of a byte there.
    """
    lost = np.zeros(len(sizes))
    for (kept_before, slower), (kept, seconds) in pairwise(corners):
        excess = -(-kept // sizes) * sizes - kept
        price = (slower - seconds) / (kept - kept_before)
        lost += excess * price / (slower + seconds)
    return lost


def _extra(options: Sequence[Option]) -> int:
    kept = [option.kept_bytes for option in options]
    return max(kept) - min(kept)


def _is_above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])

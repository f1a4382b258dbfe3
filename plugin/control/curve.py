"""Bytes as a function of tokens, learned from measurements."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

_BUCKETS_PER_DOUBLING = 8
"""Lengths closer than 9 % share a point."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured points, linear between them; the newest of each bucket of lengths."""

    points: tuple[tuple[int, int], ...] = ()
    """(tokens, bytes), ascending in tokens."""

    def updated(self, tokens: int, num_bytes: int) -> Curve:
        """Returns the curve with one more measurement; the newest of a bucket wins.

        A batch without tokens counts as one token, as nothing is in proportion to none.
        """
        tokens = max(tokens, 1)
        bucket = _bucket(tokens)
        others = [point for point in self.points if _bucket(point[0]) != bucket]
        return replace(self, points=tuple(sorted([*others, (tokens, num_bytes)])))

    def at(self, tokens: int) -> int | None:
        """Returns the bytes expected for `tokens`, None before the first measurement.

        Below the first point the value falls in proportion to the length; above the last one it
        grows in proportion, or along the last two points where these rise faster (attention that
        is quadratic in the length).
        """
        if not self.points:
            return None
        first, last = self.points[0], self.points[-1]
        if tokens <= first[0]:
            return math.ceil(first[1] * tokens / first[0])
        if tokens > last[0]:
            return self._beyond(tokens)
        upper = bisect.bisect_left(self.points, (tokens, -1))
        return _on_line(self.points[upper - 1], self.points[upper], tokens)

    def measured(self, tokens: int) -> bool:
        """Returns whether a length as good as this one was measured itself."""
        bucket = _bucket(tokens)
        return any(_bucket(point[0]) == bucket for point in self.points)

    def covers(self, tokens: int) -> bool:
        """Returns whether some measurement was at least nearly as long."""
        return bool(self.points) and _bucket(tokens) <= _bucket(self.points[-1][0])

    def _beyond(self, tokens: int) -> int:
        last_tokens, last_bytes = self.points[-1]
        in_proportion = math.ceil(last_bytes * tokens / last_tokens)
        if len(self.points) < 2:
            return in_proportion
        return max(in_proportion, _on_line(self.points[-2], self.points[-1], tokens))


def _bucket(tokens: int) -> int:
    return math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(tokens, 1)))


def _on_line(low: tuple[int, int], high: tuple[int, int], tokens: int) -> int:
    share = (tokens - low[0]) / (high[0] - low[0])
    return math.ceil(low[1] + share * (high[1] - low[1]))

"""How far the model's predictions were off: the reserve that follows, and whether to believe it.

Pure (contract 10). An error is a share of what was predicted: 0.05 where a step rose 5 % further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

WINDOW = 64
"""Errors that are remembered."""

QUANTILE = 0.95
"""The reserve is this quantile of the errors: so many of the last steps would have fit."""

MIN_ERRORS_FOR_CREDIT = 8
"""Predictions that are too high are only believed to be so after so many errors."""

FEW_ERRORS_SHARE = 0.03
"""Least reserve until then: the highest of a few errors says little of how high they can be, and
how much the allocator loses between blocks shows only as memory fills."""

MOST_CREDIT = 0.1
"""Share by which a reserve may be negative, since predictions are too high throughout."""

REPLANNED_SHARE = 0.05
"""A plan is made again if the peak of its step was off by more than this share."""

REPLANNED_SECONDS_SHARE = 0.5
"""Plans are made again if steps take so much more, or less, than they were made for."""

DISTRUSTED_SHARE = 0.25
"""A model whose error is larger, in the median, is not planned by."""

MAX_SPEED = 4.0
"""Most by which a speed differs from that on paper: where steps are so small that Python takes all
of the time, their arithmetic says nothing."""

NUM_SPEEDS = 4
"""Steps after which the time of steps is believed."""


@dataclass(frozen=True, kw_only=True)
class ForecastErrors:
    """The errors of the last predictions, of bytes and of seconds."""

    shares: tuple[float, ...] = ()
    """Errors of predicted rises, the last one at the end."""

    speeds: tuple[float, ...] = ()
    """Seconds measured as multiples of those on paper, the last ones at the end."""

    speed: float = 1.0
    """The multiple by which plans are made."""

    @property
    def reserve_share(self) -> float:
        """Share of a predicted rise that stays free on top of it, for what predictions miss."""
        few = len(self.shares) < MIN_ERRORS_FOR_CREDIT
        least = FEW_ERRORS_SHARE if few else -MOST_CREDIT
        return max(least, _quantile(self.shares, QUANTILE)) if self.shares else least

    @property
    def is_trusted(self) -> bool:
        """Whether predictions are near enough to plan by them."""
        return not self.shares or median(map(abs, self.shares[-5:])) <= DISTRUSTED_SHARE

    @property
    def measured_speed(self) -> float | None:
        """Seconds measured as multiples of those on paper; None after a few steps only."""
        return median(self.speeds) if len(self.speeds) >= NUM_SPEEDS else None

    def with_peak(self, *, predicted_bytes: int, read_bytes: int, exact: bool) -> ForecastErrors:
        """Returns the errors with one more step.

        Args:
            predicted_bytes: How far it was predicted to rise.
            read_bytes: How far it was seen to rise.
            exact: Whether memory was read after every op; else it may have risen further, and a
                reading below the prediction says nothing.
        """
        share = error_share(predicted_bytes=predicted_bytes, read_bytes=read_bytes)
        if not exact and share <= 0:
            return self
        return replace(self, shares=(*self.shares, share)[-WINDOW:])

    def with_seconds(self, *, predicted: float, measured: float) -> ForecastErrors:
        """Returns the errors with the time of one more step, and the speed if that has changed.

        Args:
            predicted: Seconds that were predicted, by the speed in force.
            measured: Seconds that it took.
        """
        if predicted <= 0 or measured <= 0:
            return self
        speeds = (*self.speeds, self.speed * measured / predicted)[-WINDOW:]
        middle = min(MAX_SPEED, max(1 / MAX_SPEED, median(speeds)))
        ratio = max(middle / self.speed, self.speed / middle)
        if len(speeds) < NUM_SPEEDS or ratio <= 1 + REPLANNED_SECONDS_SHARE:
            return replace(self, speeds=speeds)
        return replace(self, speeds=(), speed=middle)


def error_share(*, predicted_bytes: int, read_bytes: int) -> float:
    """Returns how much further a step rose than predicted, as a share of the prediction."""
    return read_bytes / max(1, predicted_bytes) - 1


def _quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

"""A reserve from errors, plans that follow the speed of steps, and models that are not believed."""

from __future__ import annotations

import pytest

from rematic.control import ForecastErrors


def _with(*shares: float) -> ForecastErrors:
    errors = ForecastErrors()
    for share in shares:
        errors = errors.with_peak(
            predicted_bytes=1000, read_bytes=round(1000 * (1 + share)), exact=True
        )
    return errors


@pytest.mark.parametrize(
    ("shares", "reserve"),
    [
        ((), 0.03),
        ((0.02,), 0.03),
        ((0.04,), 0.04),
        ((-0.05,) * 7, 0.03),
        ((-0.05,) * 8, -0.05),
        ((-0.3,) * 8, -0.1),
        ((0.0,) * 19 + (0.5,), 0.0),
        ((0.0,) * 18 + (0.5, 0.5), 0.5),
        ((0.5,) + (0.01,) * 64, 0.01),
    ],
    ids=["none", "small", "one", "few", "too-high", "bounded", "rare", "frequent", "forgotten"],
)
def test_the_reserve_is_a_high_quantile_of_the_errors(
    shares: tuple[float, ...], reserve: float
) -> None:
    assert _with(*shares).reserve_share == pytest.approx(reserve, abs=1e-9)


@pytest.mark.parametrize(("read", "counts"), [(900, False), (1000, False), (1100, True)])
def test_a_reading_at_unit_ends_counts_only_if_it_is_above_the_prediction(
    read: int, counts: bool
) -> None:
    errors = ForecastErrors().with_peak(predicted_bytes=1000, read_bytes=read, exact=False)
    assert errors.shares == ((pytest.approx(read / 1000 - 1),) if counts else ())


@pytest.mark.parametrize(
    ("shares", "trusted"),
    [((), True), ((0.24,), True), ((0.3,), False), ((-0.3,), False), ((0.01, 0.4, 0.01), True)],
)
def test_a_model_that_is_far_off_is_not_believed(shares: tuple[float, ...], trusted: bool) -> None:
    assert _with(*shares).is_trusted == trusted


@pytest.mark.parametrize(
    ("measured", "speed"),
    [(1.4, 1.0), (2.0, 2.0), (0.5, 0.5), (100.0, 4.0), (0.001, 0.25)],
    ids=["near", "slower", "faster", "python", "bounded"],
)
def test_the_speed_follows_the_steps(measured: float, speed: float) -> None:
    errors = ForecastErrors()
    for _ in range(4):
        assert errors.speed == 1.0, "one step alone is not believed"
        errors = errors.with_seconds(predicted=1.0, measured=measured)
    assert errors.speed == speed


def test_at_the_bound_the_speed_stays() -> None:
    errors = ForecastErrors(speed=4.0)
    for _ in range(20):
        errors = errors.with_seconds(predicted=1.0, measured=50.0)
    assert errors.speed == 4.0
    assert len(errors.speeds) == 20, "so plans are not made again"

from __future__ import annotations

import pytest

from rematic.recipes import FiguresConfig
from tests.recipes.refusals import assert_refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"peak": "21.4GiB"},
            "peak is '21.4GiB'; expected null, since no device is named; write device",
        ),
        (
            {"device": "H100", "peak": "21.4"},
            "peak is '21.4'; expected a size with its unit; write for example 21.4GiB",
        ),
        (
            {"device": "H100", "peak": "2147"},
            "peak is '2147'; expected a size with its unit; write for example 21.4GiB",
        ),
        (
            {"device": "H100", "step_seconds": 0.0},
            "step_seconds is 0.0; expected a finite number above 0; write seconds, or null",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused(values: dict[str, object], message: str) -> None:
    assert_refused(FiguresConfig, values, message=message)


def test_a_peak_is_bytes() -> None:
    assert FiguresConfig(device="H100", peak="1.5GiB").peak_bytes == 3 * 2**29
    assert FiguresConfig().peak_bytes is None

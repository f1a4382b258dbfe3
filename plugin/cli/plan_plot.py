"""Draws memory over a step as SVG, by hand: no library is worth it for six lines."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rematic.byte_sizes import format_bytes
from rematic.planner import Forecast, Peak, PolicyForecast

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 270, 60, 60
COLORS = ("#777777", "#d62728", "#ff7f0e", "#9467bd", "#2ca02c", "#1f77b4")
NUM_TICKS = 5


def draw(forecast: Forecast) -> str:
    """Returns an SVG of the live bytes at the highest moment of each interval of a step.

    From left to right: embedding, forward of each unit, head and loss, backward of each unit,
    embedding, optimizer. One line for each policy, the budget dashed.

    Args:
        forecast: A step of one shape.
    """
    highest = max(policy.peak.total for policy in forecast.policies)
    top = 1.05 * max(highest, forecast.budget_bytes)
    title = f"memory over a step of {forecast.batch} x {forecast.length} tokens"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 30, title, size=16),
        *_axes(top),
        *_places(forecast.planned.intervals),
        *_budget(forecast.budget_bytes, top),
    ]
    for number, policy in enumerate(forecast.policies):
        parts += _line(policy, number, top)
    return "\n".join([*parts, "</svg>", ""])


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(num_bytes: float, top: float) -> float:
    return HEIGHT - BOTTOM - num_bytes / top * (HEIGHT - TOP - BOTTOM)


def _axes(top: float) -> list[str]:
    parts = []
    for tick in range(NUM_TICKS + 1):
        y = _y(top * tick / NUM_TICKS, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        label = format_bytes(round(top * tick / NUM_TICKS))
        parts.append(_text(LEFT - 6, y + 4, label, anchor="end"))
    return parts


def _places(intervals: Sequence[Peak]) -> list[str]:
    """Marks where forward, head and backward lie."""
    places = [interval.place for interval in intervals]
    parts = []
    for place, label in (
        ("unit forward", "forward"),
        ("head", "head"),
        ("unit backward", "backward"),
        ("optimizer", "optimizer"),
    ):
        found = [i for i, one in enumerate(places) if one == place]
        if found:
            middle = (found[0] + found[-1]) / 2 / max(1, len(places) - 1)
            parts.append(_text(_x(middle), HEIGHT - BOTTOM + 20, label, anchor="middle"))
    return parts


def _budget(budget_bytes: int, top: float) -> list[str]:
    y = _y(budget_bytes, top)
    return [
        f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="black" stroke-dasharray="6 4"/>',
        _text(LEFT + 4, y - 5, f"usable: {format_bytes(budget_bytes)}"),
    ]


def _line(policy: PolicyForecast, number: int, top: float) -> list[str]:
    color = COLORS[number % len(COLORS)]
    last = max(1, len(policy.intervals) - 1)
    points = " ".join(
        f"{_x(i / last):.1f},{_y(interval.total, top):.1f}"
        for i, interval in enumerate(policy.intervals)
    )
    y = TOP + 22 * number + 10
    label = f"{policy.policy}: {format_bytes(policy.peak.total)}"
    return [
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
        f'<path d="M{WIDTH - RIGHT + 10} {y}h20" stroke="{color}" stroke-width="2"/>',
        _text(WIDTH - RIGHT + 35, y + 4, label),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )

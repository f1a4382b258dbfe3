"""Prints the demo's comparison side by side."""

from __future__ import annotations

from collections.abc import Callable

from rematic.byte_sizes import format_bytes
from rematic.journal import text_table
from rematic.training.demo_figures import (
    KEPT,
    PLAIN,
    RECOMPUTED,
    REMATIC,
    DemoFigures,
    WayFigures,
)

CAPPED_WAYS = {
    KEPT: "(a) everything kept",
    RECOMPUTED: "(b) everything recomputed",
    REMATIC: "(c) rematic",
}
"""Headings of the ways that run under the cap."""


def format_demo(figures: DemoFigures) -> str:
    """The comparison as text."""
    return "\n\n".join([_heading(figures), _table(figures), *_remarks(figures)])


def _heading(figures: DemoFigures) -> str:
    plain = figures.way(PLAIN)
    return (
        f"{figures.num_documents} documents of Python's own documentation, "
        f"{figures.num_tokens:,} tokens, cut at {figures.max_length:,}; one epoch\n"
        f"budget {format_bytes(figures.budget_bytes)}, the heap really capped; "
        f"without a cap the plain loop takes {plain.seconds:.0f} s"
    )


def _table(figures: DemoFigures) -> str:
    ways = [figures.way(name) for name in CAPPED_WAYS]
    total = figures.num_documents
    rows: dict[str, Callable[[WayFigures], str]] = {
        "documents finished": lambda way: f"{len(way.documents)} of {total}",
        "batches lost": lambda way: str(total - len(way.documents)),
        "losses bit-equal to plain": lambda way: f"{way.losses_equal} of {len(way.documents)}",
        "peak in use": lambda way: _size(way.peak_bytes),
        "evictions": lambda way: _unless_plain(way, way.evictions),
        "failed allocations answered": lambda way: _unless_plain(way, way.retries),
        "seconds": lambda way: f"{way.seconds:.1f}",
    }
    cells = [[name, *(cell(way) for way in ways)] for name, cell in rows.items()]
    return text_table(["", *CAPPED_WAYS.values()], cells)


def _remarks(figures: DemoFigures) -> list[str]:
    remarks = [
        f"{CAPPED_WAYS[way.way]} failed at document {failure.number + 1} "
        f"({failure.name!r}, {failure.length:,} tokens):\n    {failure.error}"
        for way in figures.ways
        if way.way in CAPPED_WAYS
        for failure in way.failures[:3]
    ]
    if not figures.way(KEPT).failures:
        remarks.append(
            f"{CAPPED_WAYS[KEPT]} fits into this budget: set memory.budget=... lower to see it fail"
        )
    if figures.seconds_ratio is not None:
        remarks.append(
            f"time of (c) over (b): {figures.seconds_ratio:.3f} in all; per document median "
            f"{figures.seconds_ratio_median:.3f}, from {figures.seconds_ratio_min:.3f} to "
            f"{figures.seconds_ratio_max:.3f}"
        )
    return remarks


def _unless_plain(way: WayFigures, count: int) -> str:
    return "-" if way.way == KEPT else str(count)


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)

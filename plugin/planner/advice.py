"""What would lower the peak, by where it lies."""

from __future__ import annotations

from rematic.byte_sizes import format_bytes
from rematic.planner.forecast import Forecast
from rematic.planner.problem import Peak

WORTH_SAYING = 0.02
"""Remedies that take less than this share off the peak are not mentioned."""


def where_of(peak: Peak) -> str:
    """Returns where a peak lies, in words."""
    if peak.unit is not None:
        return f"{peak.place} {peak.unit}"
    return "head and loss" if peak.place == "head" else peak.place


def advice_of(forecast: Forecast) -> tuple[str, ...]:
    """Returns what would lower the peak of the planner's plan, most effective first.

    Args:
        forecast: A step of one shape.
    """
    peak = forecast.planned.peak
    lines = []
    if peak.fixed > forecast.budget_bytes:
        lines.append(
            f"weights, gradients that stay and optimizer state alone are "
            f"{format_bytes(peak.fixed)}: no plan for activations helps. Train adapters (LoRA), "
            "quantize frozen weights, take an optimizer with 8-bit state, or shard over devices."
        )
    saved = peak.total - forecast.without_head_bytes
    if peak.place == "head" and saved >= WORTH_SAYING * peak.total:
        lines.append(
            f"the peak lies in head and loss, where the logits are: recomputing more blocks does "
            f"not lower it. A tiled loss (`use_tiled_loss`) takes off up to {format_bytes(saved)}."
        )
    if peak.place == "optimizer" and peak.working >= WORTH_SAYING * peak.total:
        lines.append(
            f"the peak lies in the step of the optimizer, which needs {format_bytes(peak.working)} "
            "for itself: a fused one (`fused=True`) needs nothing."
        )
    if peak.unit is not None and peak.working >= peak.total / 4 and not forecast.planned.fits:
        lines.append(
            f"one block at work needs {format_bytes(peak.working)}: run its token-wise part in "
            "slices of the sequence (action `tile`), or cut the sequences."
        )
    return tuple(lines)

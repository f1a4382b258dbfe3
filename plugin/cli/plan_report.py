"""What `rematic plan` found, as text and as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rematic.byte_sizes import format_bytes
from rematic.cost.devices import MIB, Device
from rematic.journal.table import text_table
from rematic.planner import Forecast, Peak, PolicyForecast, advice_of, where_of

HEADERS = (
    "policy",
    "peak",
    "kept",
    "gradients",
    "working set",
    "head, loss",
    "where",
    "seconds",
    "slow-down",
    "fits",
)


def usable_bytes_of(budget_bytes: int, reserve: float) -> int:
    """Returns the bytes of a budget that plans may use.

    Args:
        budget_bytes: Bytes that may be in use.
        reserve: Share of them that plans leave unused.
    """
    return int(budget_bytes * (1 - reserve))


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The whole answer."""

    recipe: str
    """Name of the recipe."""

    device: Device
    """What it is planned for."""

    budget_bytes: int
    """Bytes that may be in use."""

    reserve: float
    """Share of them that plans leave unused."""

    forecasts: tuple[Forecast, ...]
    """By rising length."""

    longest: Mapping[str, int] | None
    """Longest sequence that fits, by policy; None if nobody asked."""

    longest_limit: int
    """Longest sequence that was tried."""

    notes: tuple[str, ...] = ()
    """What a reader should know."""

    @property
    def usable_bytes(self) -> int:
        """Bytes that plans may use."""
        return usable_bytes_of(self.budget_bytes, self.reserve)

    def smallest_budget_bytes(self, forecast: Forecast) -> int:
        """The smallest budget that any plan of a step fits into."""
        budget_bytes = math.ceil(forecast.smallest_bytes / (1 - self.reserve))
        while usable_bytes_of(budget_bytes, self.reserve) < forecast.smallest_bytes:
            budget_bytes += max(1, budget_bytes >> 50)  # what a float tells apart
        return budget_bytes

    def to_dict(self) -> dict[str, object]:
        """Returns it as dictionaries, lists, strings and numbers."""
        return {
            "recipe": self.recipe,
            "device": {
                "name": self.device.name,
                "memory_bytes": self.device.memory_bytes,
                "source": self.device.source,
            },
            "budget_bytes": self.budget_bytes,
            "usable_bytes": self.usable_bytes,
            "lengths": [
                {
                    **_forecast_to_dict(forecast),
                    "smallest_budget_bytes": self.smallest_budget_bytes(forecast),
                }
                for forecast in self.forecasts
            ],
            "longest": None if self.longest is None else dict(self.longest),
            "longest_limit": self.longest_limit,
            "notes": list(self.notes),
        }


def format_plan(report: PlanReport) -> str:
    """The report as a person reads it."""
    lines = [
        f"recipe {report.recipe} on {report.device.name}: budget "
        f"{format_bytes(report.budget_bytes)}, of which plans use "
        f"{format_bytes(report.usable_bytes)}",
        f"predicted from a trace without weights; seconds by {report.device.source}",
        *(f"note: {note}" for note in report.notes),
    ]
    for forecast in report.forecasts:
        lines += ["", *_length_lines(forecast)]
        if not forecast.planned.fits:
            smallest = -(-report.smallest_budget_bytes(forecast) // MIB)
            lines.append(f"no plan fits: the smallest budget that is enough is {smallest}MiB")
    if report.longest is not None:
        lines += ["", f"longest sequence that fits (up to {report.longest_limit} tokens)"]
        rows = [[policy, str(length)] for policy, length in report.longest.items()]
        lines.append(text_table(("policy", "tokens"), rows))
    return "\n".join(lines)


def _length_lines(forecast: Forecast) -> list[str]:
    fixed = forecast.fixed
    rows = [_row(policy) for policy in forecast.policies]
    planned = ", ".join(f"{count} x {action}" for action, count in forecast.planned.plan.items())
    return [
        f"{forecast.batch} x {forecast.length} tokens: weights {format_bytes(fixed.weights)}, "
        f"gradients that stay {format_bytes(fixed.gradients)}, optimizer "
        f"{format_bytes(fixed.optimizer)}, other {format_bytes(fixed.other)}",
        text_table(HEADERS, rows),
        f"planned: {planned}",
        *(f"advice: {line}" for line in advice_of(forecast)),
    ]


def _row(forecast: PolicyForecast) -> list[str]:
    peak = forecast.peak
    return [
        forecast.policy,
        format_bytes(peak.total),
        format_bytes(_kept(peak)),
        format_bytes(max(0, peak.gradients)),
        format_bytes(peak.working - _head(peak)),
        format_bytes(_head(peak)),
        where_of(peak),
        f"{forecast.seconds:.3g}",
        f"{forecast.slow_down:.1%}",
        "yes" if forecast.fits else "no",
    ]


def _forecast_to_dict(forecast: Forecast) -> dict[str, object]:
    fixed = forecast.fixed
    return {
        "batch": forecast.batch,
        "length": forecast.length,
        "weights_bytes": fixed.weights,
        "gradients_bytes": fixed.gradients,
        "optimizer_bytes": fixed.optimizer,
        "other_bytes": fixed.other,
        "without_head_bytes": forecast.without_head_bytes,
        "advice": list(advice_of(forecast)),
        "policies": [_policy_to_dict(policy) for policy in forecast.policies],
    }


def _policy_to_dict(forecast: PolicyForecast) -> dict[str, object]:
    return {
        "policy": forecast.policy,
        "plan": forecast.plan,
        "fits": forecast.fits,
        "seconds": forecast.seconds,
        "slow_down": forecast.slow_down,
        "peak": _peak_to_dict(forecast.peak),
    }


def _peak_to_dict(peak: Peak) -> dict[str, object]:
    return {
        "bytes": peak.total,
        "place": peak.place,
        "unit": peak.unit,
        "fixed_bytes": peak.fixed,
        "kept_bytes": _kept(peak),
        "gradients_bytes": max(0, peak.gradients),
        "working_bytes": peak.working - _head(peak),
        "head_bytes": _head(peak),
    }


def _kept(peak: Peak) -> int:
    """Bytes kept, less what backward has freed by then beyond the gradients that it left."""
    return peak.kept + min(0, peak.gradients)


def _head(peak: Peak) -> int:
    """Bytes that head and loss need beyond what is kept, where the peak lies in them."""
    return peak.working if peak.place == "head" else 0

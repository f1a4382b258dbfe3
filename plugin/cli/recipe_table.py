"""The recipes side by side: what is written in them, and what the planner says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rematic.byte_sizes import format_bytes
from rematic.journal.table import text_table
from rematic.recipes import FiguresConfig, Recipe

if TYPE_CHECKING:
    from rematic.cli.recipe_forecast import RecipeForecast
    from rematic.planner import PolicyForecast

LIST_HEADERS = ("recipe", "tokens", "device", "peak", "seconds", "tokens/s", "measured", "what")

MARKDOWN_POLICIES = {
    "nothing recomputed": "keep all",
    "every block": "recompute all",
    "list of ops": "op list",
}
"""Columns of static baselines, and the rows of a forecast that they show."""


def format_list(recipes: Sequence[Recipe]) -> str:
    """The list as a person reads it, from what the recipes say of themselves."""
    return text_table(LIST_HEADERS, [_list_row(recipe) for recipe in recipes])


def recipe_to_dict(recipe: Recipe) -> dict[str, object]:
    """What the list says of one recipe, as plain values."""
    return {
        "name": recipe.name,
        "description": recipe.description,
        "model": recipe.model.id or recipe.model.path or recipe.model.type,
        "task": recipe.model.task,
        "method": recipe.tuning.method,
        "max_length": recipe.data.max_length,
        "batch_size": recipe.data.batch_size,
        "strategy": recipe.distributed.strategy,
        "devices": recipe.distributed.devices,
        "planned_on": _figures_to_dict(recipe, recipe.planned_on),
        "measured_on": _figures_to_dict(recipe, recipe.measured_on),
    }


def format_markdown(forecasts: Sequence[RecipeForecast]) -> str:
    """The table of the README: predicted peak and tokens per second, and what was measured."""
    headers = ("recipe", "tokens", "device", *MARKDOWN_POLICIES, "rematic", "measured")
    lines = [_cells(headers), _cells(["---"] * len(headers))]
    return "\n".join([*lines, *(markdown_row(forecast) for forecast in forecasts)])


def markdown_row(forecast: RecipeForecast) -> str:
    """The row of one recipe."""
    recipe = forecast.recipe
    baselines = [_cell(forecast, forecast.row(row)) for row in MARKDOWN_POLICIES.values()]
    return _cells(
        [
            f"[`{recipe.name}`](recipes/{recipe.name}.yaml)",
            _tokens(recipe),
            device_text(recipe, recipe.planned_on),
            *baselines,
            _cell(forecast, forecast.own),
            _measured(recipe) or "not yet",
        ]
    )


def device_text(recipe: Recipe, figures: FiguresConfig) -> str:
    """The device and how many of them there are."""
    count = recipe.distributed.devices
    name = figures.device or "-"
    return name if count == 1 else f"{count} x {name}"


def predicted_rate(recipe: Recipe) -> float | None:
    """Tokens per second of steps of the longest sequences on all devices, None if not known."""
    seconds = recipe.planned_on.step_seconds
    if seconds is None:
        return None
    tokens = recipe.data.batch_size * recipe.data.max_length * recipe.distributed.devices
    return tokens / seconds


def _list_row(recipe: Recipe) -> list[str]:
    planned, rate = recipe.planned_on, predicted_rate(recipe)
    return [
        recipe.name,
        _tokens(recipe),
        device_text(recipe, planned),
        _peak(planned) or "-",
        "-" if planned.step_seconds is None else f"{planned.step_seconds:.3g}",
        "-" if rate is None else _rate(rate),
        _measured(recipe) or "-",
        recipe.description,
    ]


def _figures_to_dict(recipe: Recipe, figures: FiguresConfig) -> dict[str, object]:
    rate = figures.tokens_per_second
    return {
        "device": figures.device,
        "peak_bytes": figures.peak_bytes,
        "step_seconds": figures.step_seconds,
        "tokens_per_second": predicted_rate(recipe) if figures is recipe.planned_on else rate,
    }


def _measured(recipe: Recipe) -> str:
    figures = recipe.measured_on
    rate = figures.tokens_per_second
    parts = [_peak(figures), None if rate is None else f"{_rate(rate)} tokens/s"]
    return ", ".join(part for part in parts if part is not None)


def _peak(figures: FiguresConfig) -> str | None:
    return None if figures.peak_bytes is None else format_bytes(figures.peak_bytes)


def _cell(forecast: RecipeForecast, row: PolicyForecast) -> str:
    peak = format_bytes(row.peak.total)
    if forecast.is_out_of_memory(row):
        return f"{peak}: out of memory"
    return f"{peak}, {_rate(forecast.tokens_per_second(row))} tokens/s"


def _tokens(recipe: Recipe) -> str:
    batch, length = recipe.data.batch_size, f"{recipe.data.max_length:,}"
    return length if batch == 1 else f"{batch} x {length}"


def _rate(tokens_per_second: float) -> str:
    return f"{float(f'{tokens_per_second:.3g}'):,.0f}"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

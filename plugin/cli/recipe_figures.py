"""What a plan says of a recipe, as the recipe's own keys say it."""

from __future__ import annotations

from rematic.byte_sizes import format_bytes
from rematic.cli.recipe_forecast import RecipeForecast
from rematic.recipes import FiguresConfig


def planned_figures(forecast: RecipeForecast) -> FiguresConfig:
    """Returns `planned_on` of a recipe by its forecast.

    On a CPU there is only a peak: seconds are those of the machine at hand.
    """
    own, is_cpu = forecast.own, forecast.device.name == "cpu"
    return FiguresConfig(
        device=forecast.device.name,
        peak=format_bytes(own.peak.total).replace(" ", ""),
        step_seconds=None if is_cpu else float(f"{own.seconds:.3g}"),
    )

"""Writes the figures of the shipped recipes: by plan into all of them, by measurement into some.

    .venv/bin/python benchmarks/recipe_figures.py                      # plan every recipe
    .venv/bin/python benchmarks/recipe_figures.py tiny-cpu-qlora       # plan some
    .venv/bin/python benchmarks/recipe_figures.py --measure tiny-cpu   # train it and measure

`planned_on` and `measured_on` of each recipe are written anew, and the table of recipes in the
README. The device to plan for is the one that the recipe names. What is measured is a whole run on
this machine, which should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from rematic.byte_sizes import format_bytes
from rematic.cli.recipe_figures import planned_figures
from rematic.cli.recipe_forecast import Profiles, forecast_recipe
from rematic.cli.recipe_table import format_markdown
from rematic.cli.recipes_command import shipped_recipes
from rematic.journal import read_journal, summarize
from rematic.recipes import FiguresConfig, Recipe, format_plain, list_recipes, load_recipe

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"


def main() -> None:
    """Plans, or measures, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*list_recipes(), []], help="recipes")
    parser.add_argument("--measure", action="store_true", help="train the named recipes")
    arguments = parser.parse_args()
    if arguments.measure:
        for name in arguments.names:
            write_section(name, "measured_on", measured_figures(name))
    profiles = Profiles()
    forecasts = []
    for recipe in shipped_recipes():
        forecast = forecast_recipe(recipe, profiles=profiles)
        if not arguments.measure and (not arguments.names or recipe.name in arguments.names):
            write_section(recipe.name, "planned_on", planned_figures(forecast))
        forecasts.append(replace(forecast, recipe=load_recipe(recipe.name)))
        print(f"{recipe.name}: {format_bytes(forecast.own.peak.total)}", file=sys.stderr)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text("utf-8"), format_markdown(forecasts)), "utf-8")


def with_table(text: str, table: str) -> str:
    """A page with the table in place of what stands between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}\n{END}{after}"


def write_section(name: str, section: str, figures: FiguresConfig) -> None:
    """Replaces a section of figures in the file of a shipped recipe, or adds it at the end."""
    path = ROOT / "recipes" / f"{name}.yaml"
    values = {field.name: getattr(figures, field.name) for field in fields(figures)}
    known = {key: value for key, value in values.items() if value is not None}
    text = re.sub(rf"\n{section}:\n(?:  .*\n)+", "\n", path.read_text("utf-8"))
    written = format_plain({section: known})
    path.write_text(f"{text.rstrip()}\n\n{written}", "utf-8")


def measured_figures(name: str) -> FiguresConfig:
    """Trains a recipe in a process of its own and returns what it needed."""
    recipe: Recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rematic.cli", "train", name]
        options = [f"run.dir={folder}", "run.name=measured", "run.save=none"]
        subprocess.run([*command, *options], check=True)
        summary = summarize(read_journal(Path(folder) / "measured" / "journal.jsonl"))
    if summary.peak_bytes is None or summary.status != "finished":
        raise SystemExit(f"{name} did not finish, or nobody knows its peak")
    rate = summary.tokens_per_second
    return FiguresConfig(
        device=recipe.planned_on.device,
        peak=format_bytes(summary.peak_bytes).replace(" ", ""),
        tokens_per_second=None if rate is None else float(f"{rate:.3g}"),
    )


if __name__ == "__main__":
    main()

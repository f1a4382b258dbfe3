"""Writes the figures of the shipped recipes: by plan into all of them, by measurement into some.

    .venv/bin/python benchmarks/recipe_figures.py                      # plan every recipe
    .venv/bin/python benchmarks/recipe_figures.py tiny-cpu-qlora       # plan some
    .venv/bin/python benchmarks/recipe_figures.py --measure tiny-cpu   # train it and measure

`planned_on`, `measured_on` and the line `# Measured:` of each recipe are written anew, and the
table of recipes in the README. The device to plan for is the one that the recipe names. What is
measured is a whole run on this machine, with one thread in each process. Tokens per second are
those of CPU time after the first step, so other work on the machine changes them far less.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from rematic.byte_sizes import format_bytes
from rematic.cli.recipe_figures import planned_figures
from rematic.cli.recipe_forecast import Profiles, forecast_recipe
from rematic.cli.recipe_table import format_markdown
from rematic.cli.recipes_command import shipped_recipes
from rematic.journal import RunSummary, read_journal, summarize
from rematic.recipes import FiguresConfig, Recipe, format_plain, list_recipes, load_recipe
from rematic.training.data import load_data

ROOT = Path(__file__).parents[1]
_SET_CHILD_SUBREAPER = 36
"""`PR_SET_CHILD_SUBREAPER` of Linux."""
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"


def main() -> None:
    """Plans, or measures, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*list_recipes(), []], help="recipes")
    parser.add_argument("--measure", action="store_true", help="train the named recipes")
    arguments = parser.parse_args()
    if arguments.measure:
        for name in arguments.names:
            figures = measured_figures(load_recipe(name))
            write_section(name, "measured_on", figures)
            write_measured_line(name, measured_where())
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
    text, written = path.read_text("utf-8"), format_plain({section: known})
    changed, count = re.subn(rf"(?m)^{section}:\n(?:  .*\n)+", lambda _: written, text)
    path.write_text(changed if count else f"{text.rstrip()}\n\n{written}", "utf-8")


def write_measured_line(name: str, where: str) -> None:
    """Writes into the header of a shipped recipe what its figures were measured on."""
    path = ROOT / "recipes" / f"{name}.yaml"
    path.write_text(with_measured_line(path.read_text("utf-8"), where), "utf-8")


def with_measured_line(text: str, where: str) -> str:
    """A recipe with another line `# Measured:` in its header."""
    line = f"# Measured: {where}; see measured_on.\n"
    changed, count = re.subn(r"(?m)^# Measured: .*\n(?:#   .*\n)*", lambda _: line, text, count=1)
    if count != 1:
        raise ValueError("the header has no line that begins with '# Measured: '; write one")
    return changed


def measured_where() -> str:
    """Names the day and what was measured on, as far as the figures depend on it."""
    day = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    python = platform.python_version()
    return f"{day}, one thread a process, Python {python}, PyTorch {torch.__version__}"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run in a process of its own."""

    summary: RunSummary
    """What its journal says."""
    cpu_seconds: float
    """CPU time of all its processes, their start included."""
    seconds: float
    """Time by the clock."""


def measured_figures(recipe: Recipe) -> FiguresConfig:
    """Trains a recipe and returns what it needed.

    A run of one step goes first: what starting takes is the same in both and falls out.
    """
    start, whole = measured_run(recipe, "training.max_steps=1"), measured_run(recipe)
    devices = recipe.distributed.devices
    first, every = tokens_of_ranks(recipe)
    if whole.summary.tokens != every[0]:
        raise SystemExit(f"{recipe.name} trained {whole.summary.tokens} tokens, not {every[0]}")
    rate = (sum(every) - sum(first)) / (whole.cpu_seconds - start.cpu_seconds) * devices
    print(
        f"{recipe.name}: {sum(every)} tokens, {whole.cpu_seconds:.0f} s of CPU time, "
        f"{start.cpu_seconds:.0f} s to the end of the first step, {whole.seconds:.0f} s by the "
        f"clock, peak {whole.summary.peak_bytes}, {whole.summary.evictions} evictions, "
        f"{whole.summary.op_retries + whole.summary.unit_retries} retries, prediction error median "
        f"{whole.summary.prediction_error_median} max {whole.summary.prediction_error_max}, "
        f"last loss {whole.summary.last_loss}, {rate:.1f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
    return FiguresConfig(
        device=recipe.planned_on.device,
        peak=format_bytes(whole.summary.peak_bytes or 0).replace(" ", ""),
        tokens_per_second=float(f"{rate:.3g}"),
    )


def measured_run(recipe: Recipe, *overrides: str) -> MeasuredRun:
    """Trains a recipe with one thread in each process, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rematic.cli", "train", recipe.name, *overrides]
        options = [f"run.dir={folder}", "run.name=measured", "run.save=none", "training.threads=1"]
        begin, cpu = time.perf_counter(), _cpu_seconds_of_children()
        with _every_descendant_counts():
            subprocess.run([*command, *options], check=True)
        seconds, cpu = time.perf_counter() - begin, _cpu_seconds_of_children() - cpu
        summary = summarize(read_journal(Path(folder) / "measured" / "journal.jsonl"))
    if summary.peak_bytes is None or summary.status != "finished":
        raise SystemExit(f"{recipe.name} did not finish, or nobody knows its peak")
    return MeasuredRun(summary=summary, cpu_seconds=cpu, seconds=seconds)


def tokens_of_ranks(recipe: Recipe) -> tuple[list[int], list[int]]:
    """Tokens of the first step and of a whole run, padding included, by rank."""
    ranks = range(recipe.distributed.devices)
    loaders = [load_data(recipe, rank=rank, num_ranks=len(ranks)).loader for rank in ranks]
    sizes = [[batch["input_ids"].numel() for batch in loader] for loader in loaders]
    return [one[0] for one in sizes], [sum(one) for one in sizes]


@contextlib.contextmanager
def _every_descendant_counts() -> Iterator[None]:
    """Takes in processes that nobody has waited for, whose CPU time is told to nobody else.

    The first process of a run starts the others and leaves them behind.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

"""`rematic recipes new --model MODEL --device NAME --length N`: a recipe that fits."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rematic.byte_sizes import format_bytes
from rematic.cli.exit_codes import DONE
from rematic.cli.plan_command import parse_lengths
from rematic.recipes import ModelConfig, Recipe, differences_as_plain, format_plain, parse_budget

if TYPE_CHECKING:
    from rematic.cli.new_recipe import Wish
    from rematic.cli.recipe_forecast import RecipeForecast

_NEED_MORE = ("seq2seq", "sequence-classification")
"""Tasks whose data must say more than where the documents are."""


def run_new(arguments: argparse.Namespace) -> int:
    """Writes the recipe and says what it needs.

    Raises:
        ValueError: An argument cannot be used, a file is there already, or nothing fits.
    """
    output = None if arguments.output is None else _checked(Path(arguments.output), arguments.force)
    wish = _wish(arguments)
    from rematic.cli.new_recipe import first_that_fits

    found, planned = first_that_fits(wish)
    if found is None:
        raise ValueError(_refusal(wish, planned))
    path = output or _checked(Path(f"{found.recipe.name}.yaml"), arguments.force)
    recipe = replace(_with_figures(found), name=path.stem)
    try:
        with path.open("w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(recipe_text(recipe, path=path, forecast=found))
    except OSError as error:  # somebody was faster, or may not write there
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); name another file by --output"
        ) from error
    print(_summary_json(path, found, planned) if arguments.json else _summary(path, found, planned))
    return DONE


def recipe_text(recipe: Recipe, *, path: Path, forecast: RecipeForecast) -> str:
    """The file: a header, and what differs from the defaults."""
    device, shown = recipe.planned_on, _shown(path)
    header = (
        f"# Purpose: {recipe.description}.",
        f"# Run:      rematic train {shown}",
        f"# Override: rematic train {shown} data.source=documents/ training.max_steps=20",
        f"# Planned:  by `rematic recipes new` for one {device.device}: {device.peak} of "
        f"{format_bytes(forecast.budget_bytes)} at the longest sequence.",
        "# Measured: nothing yet.",
        "# data.source names your documents: .txt, .jsonl or .parquet files; without it the texts",
        "#   of Python's own documentation are read.",
    )
    return "\n".join([*header, format_plain(differences_as_plain(recipe))])


def _wish(arguments: argparse.Namespace) -> Wish:
    (length, *more) = parse_lengths(arguments.length, longest=0)
    if more:
        raise ValueError(f"--length is {arguments.length!r}; expected one length, such as 32k")
    is_cpu = arguments.device.lower() == "cpu"
    if is_cpu and arguments.budget is None:
        raise ValueError(
            "a recipe for the CPU needs a budget, since its memory is also for others; add for "
            "example --budget 4GiB"
        )
    budget = parse_budget(arguments.budget or "auto")
    # Only now what takes seconds to import.
    from rematic.cli.named_model import model_named
    from rematic.cli.new_recipe import Wish
    from rematic.cost.calibrate import local_cpu
    from rematic.cost.devices import gpu_named

    device = None if is_cpu else gpu_named(arguments.device)
    model = model_named(arguments.model)
    if model.task in _NEED_MORE:
        raise ValueError(
            f"--model is {arguments.model!r}, a model for {model.task}; expected one for causal-lm "
            "or masked-lm, since other data must say where its answers or classes are: write a "
            "recipe that extends a shipped one, and plan it by `rematic plan`"
        )
    _check_length(model, length)
    return Wish(
        model=model,
        device=device or local_cpu(),
        budget=budget,
        length=length,
        method=arguments.method,
    )


def _checked(path: Path, force: bool) -> Path:
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output is {str(path)!r}; expected a name that ends in .yaml")
    if not path.parent.is_dir():
        raise ValueError(
            f"{path} cannot be written: there is no folder {path.parent}; expected a file in a "
            "folder that exists"
        )
    try:
        Recipe(name=path.stem)
        is_there = path.exists()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} cannot name a recipe ({error}); name another file by --output"
        ) from error
    if is_there and not force:
        raise ValueError(
            f"{path} exists already; name another file by --output, or replace it by --force"
        )
    return path


def _shown(path: Path) -> str:
    """The path as a shell and `rematic train` take it."""
    return shlex.quote(str(path) if path.is_absolute() else f"./{path}")


def _check_length(model: ModelConfig, length: int) -> None:
    from rematic.training.model_config import positions_of

    positions = positions_of(model)
    if positions is not None and length > positions:
        raise ValueError(
            f"--length is {length:,} tokens, but the model has positions for {positions:,} tokens; "
            f"write at most --length {positions}"
        )


def _with_figures(found: RecipeForecast) -> Recipe:
    from rematic.cli.recipe_figures import planned_figures

    return replace(found.recipe, planned_on=planned_figures(found))


def _summary(path: Path, found: RecipeForecast, planned: list[RecipeForecast]) -> str:
    own = found.own
    plan = ", ".join(f"{count} x {action}" for action, count in own.plan.items())
    return "\n".join(
        [
            *(f"{_way(one)}: {_need(one)}, too much" for one in planned if one is not found),
            f"{_way(found)}: {_need(found)} of {format_bytes(found.budget_bytes)} on "
            f"{found.device.name}, {own.seconds:.3g} s a micro-batch ({plan})",
            f"wrote {path}: rematic train {_shown(path)}",
        ]
    )


def _summary_json(path: Path, found: RecipeForecast, planned: list[RecipeForecast]) -> str:
    ways = [
        {
            "method": one.recipe.tuning.method,
            "optimizer": getattr(one.recipe.training.optimizer, "name", ""),
            "peak_bytes": one.own.peak.total,
            "step_seconds": one.own.seconds,
            "fits": one.own.fits,
        }
        for one in planned
    ]
    return json.dumps(
        {
            "file": str(path),
            "device": found.device.name,
            "budget_bytes": found.budget_bytes,
            "plan": found.own.plan,
            "tried": ways,
        },
        indent=2,
    )


def _refusal(wish: Wish, planned: list[RecipeForecast]) -> str:
    from rematic.cli.new_recipe import device_that_fits, length_text

    least = min(planned, key=lambda one: one.own.peak.total)
    tried = "; ".join(f"{_way(one)} needs {_need(one)}" for one in planned)
    longest = least.longest()
    larger = device_that_fits(least)
    remedies = []
    if longest >= 2:
        remedies.append(f"--length {length_text(longest)} ({_way(least)} fits up to there)")
    if larger is not None:
        remedies.append(f"--device {larger.name}")
    elif not remedies:
        remedies.append("a smaller model")
    usable = format_bytes(least.forecast.budget_bytes)
    return (
        f"nothing fits sequences of {wish.length:,} tokens into the {usable} that plans may use on "
        f"{wish.device.name}: {tried}; the smallest of these is {_way(least)}. What would fit: "
        f"{', or '.join(remedies)}"
    )


def _way(forecast: RecipeForecast) -> str:
    recipe = forecast.recipe
    name = getattr(recipe.training.optimizer, "name", "")
    return recipe.tuning.method if name == "adamw" else f"{recipe.tuning.method} with {name}"


def _need(forecast: RecipeForecast) -> str:
    return format_bytes(forecast.own.peak.total)

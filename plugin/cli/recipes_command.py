"""`rematic recipes` and `rematic recipes show RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import rematic.recipes
from rematic.cli.exit_codes import DONE
from rematic.cli.recipe_table import format_list, format_markdown, recipe_to_dict
from rematic.recipes import (
    Recipe,
    format_recipe,
    list_recipes,
    load_recipe,
    load_recipe_with_origins,
    recipe_as_plain,
)

_DEVICES = ("cpu", "rtx", "a100", "h100")
"""Beginnings of the names of devices, from small to large."""


def run_list(arguments: argparse.Namespace) -> int:
    """Prints the shipped recipes, those for small devices first."""
    recipes = shipped_recipes()
    if arguments.markdown:
        from rematic.cli.recipe_forecast import Profiles, forecast_recipe  # seconds to import

        profiles = Profiles()
        print(format_markdown([forecast_recipe(one, profiles=profiles) for one in recipes]))
    elif arguments.json:
        print(json.dumps([recipe_to_dict(recipe) for recipe in recipes], indent=2))
    else:
        print(format_list(recipes))
        print(
            "\npeak, seconds and tokens/s are predicted, for a batch of the longest sequences\n"
            "`rematic recipes show RECIPE` prints one, `rematic plan RECIPE` plans it anew"
        )
    return DONE


def run_show(arguments: argparse.Namespace) -> int:
    """Prints a recipe with all its values, and where each was written.

    Raises:
        ValueError: The recipe cannot be used as written.
    """
    config = _accelerate_config(arguments.recipe)
    if config is not None:
        if arguments.json or arguments.overrides:
            given = "--json" if arguments.json else arguments.overrides[0]
            raise ValueError(
                f"{arguments.recipe} is a config of Accelerate, and {given} was given; expected "
                "its name alone, since it has no keys of a recipe: copy it and edit the copy"
            )
        print(config.read_text("utf-8"), end="")
        return DONE
    recipe, origins = load_recipe_with_origins(arguments.recipe, arguments.overrides)
    if arguments.json:
        places = {path: str(origin) for path, origin in origins.items()}
        print(json.dumps({"recipe": recipe_as_plain(recipe), "origins": places}, indent=2))
    else:
        print(format_recipe(recipe, origins=origins), end="")
    return DONE


def _accelerate_config(name: str) -> Path | None:
    """The shipped config of Accelerate that is called `accelerate/NAME`; None if there is none."""
    folder, _, stem = name.partition("/")
    path = Path(rematic.recipes.__file__).parent / folder / f"{stem}.yaml"
    return path if folder == "accelerate" and path.is_file() else None


def shipped_recipes() -> list[Recipe]:
    """The recipes of the package: those for a CPU, then by number and kind of cards, then name."""
    return sorted((load_recipe(name) for name in list_recipes()), key=_place)


def _place(recipe: Recipe) -> tuple[bool, int, int]:
    device = recipe.planned_on.device or ""
    found = [at for at, name in enumerate(_DEVICES) if device.startswith(name)]
    kind = found[0] if found else len(_DEVICES)
    return device != "cpu", recipe.distributed.devices, kind

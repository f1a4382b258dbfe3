"""`rematic config --config_file X`: shows the toggle of an Accelerate config, or sets it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rematic.cli.accelerate_file import (
    FSDP_SECTION,
    SECTION,
    load_accelerate_file,
    section_of,
)
from rematic.cli.config_edit import edit_section
from rematic.cli.exit_codes import DONE
from rematic.hosts.recompute_environment import FSDP_KEY
from rematic.recipes import load_recipe


def run_config(arguments: argparse.Namespace) -> int:
    """Sets what was asked for, and prints what the file says then.

    Raises:
        ValueError: If the file or the recipe cannot be used, or it is Accelerate's default file.
    """
    path = Path(arguments.config_file)
    config = load_accelerate_file(path)
    section = section_of(config, path=path)
    values = _values(arguments, is_new=section is None)
    if values:
        _refuse_default(path)
        _refuse_second_place(config, path)
        with path.open(encoding="utf-8", newline="") as file:  # lines end as they did
            edited = edit_section(file.read(), values)
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(edited)
        section = section_of(load_accelerate_file(path), path=path)
    if arguments.json:
        print(json.dumps(None if section is None else {**vars(section)}, indent=2))
    elif section is None:
        print(f"{path} says nothing about recomputation")
    else:
        over = f", overrides {' '.join(section.overrides)}" if section.overrides else ""
        print(f"{path}: {'on' if section.enabled else 'off'}, recipe {section.recipe}{over}")
    return DONE


def _values(arguments: argparse.Namespace, *, is_new: bool) -> dict[str, bool | str]:
    values: dict[str, bool | str] = {}
    if arguments.enable or arguments.disable:
        values["enabled"] = bool(arguments.enable)
    elif arguments.recipe is not None and is_new:
        values["enabled"] = True
    if arguments.recipe is not None:
        load_recipe(arguments.recipe)
        values["recipe"] = arguments.recipe
    return values


def _refuse_default(path: Path) -> None:
    from accelerate.commands.config.config_args import default_config_file

    if path.resolve() == Path(default_config_file).resolve():
        raise ValueError(
            f"{path} is Accelerate's default file: `accelerate launch`, `env` and `config update` "
            f"refuse it once it has the key {SECTION}. Expected another file: copy it and name the "
            f"copy by --config_file, or write `{FSDP_KEY}: RECIPE` into its {FSDP_SECTION} by hand"
        )


def _refuse_second_place(config: Mapping[str, Any], path: Path) -> None:
    fsdp = config.get(FSDP_SECTION)
    if isinstance(fsdp, dict) and FSDP_KEY in fsdp:
        raise ValueError(
            f"{path} has {FSDP_SECTION}.{FSDP_KEY} already; expected one place. Remove that key, "
            f"or edit it by hand"
        )

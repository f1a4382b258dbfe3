"""What a launcher tells a script about recomputation, by environment variables."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("rematic")
RECIPE = "REMATIC_RECIPE"
"""Name or path of the recipe."""
OVERRIDES = "REMATIC_OVERRIDES"
"""`key=value` texts over it, as a JSON list."""
ENABLED = "REMATIC_ENABLED"
"""`true` or `false`; without it a named recipe means true."""
ACCELERATE_KEY = "FSDP_ACTIVATION_CHECKPOINTING"
"""What `accelerate launch` makes of `fsdp_config.fsdp_activation_checkpointing`."""
FSDP_KEY = "rematic_recipe"
"""Key of `fsdp_config` that names a recipe; `accelerate launch` does not pass it on."""

_LAUNCHED = "ACCELERATE_MIXED_PRECISION"
"""Set by every launcher of Accelerate."""
_CONFIG_FILE = ("--config_file", "--config-file")
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the fields of a `RecomputePlugin` that the environment decides.

    Args:
        environment: The variables; None for those of the process.

    Raises:
        ValueError: If a variable holds something else than it should.
    """
    found = os.environ if environment is None else environment
    recipe = found.get(RECIPE) or None
    fields: dict[str, Any] = {"recipe": recipe or "auto", "overrides": _overrides(found)}
    asked, by_key = _truth(found, ENABLED), _truth(found, ACCELERATE_KEY)
    if asked is not None:
        return {**fields, "enabled": asked}
    if recipe is None and by_key:
        _log.warning(
            "%s=true (fsdp_config.fsdp_activation_checkpointing) turns rematic on, with the recipe "
            "`auto`; set %s for another one.",
            ACCELERATE_KEY,
            RECIPE,
        )
    enabled = recipe is not None or bool(by_key)
    if not enabled:
        _warn_of_lost_key(found)
        _log.info("rematic is off: neither %s nor the Accelerate config turns it on.", RECIPE)
    return {**fields, "enabled": enabled}


def _warn_of_lost_key(environment: Mapping[str, str]) -> None:
    """Says that `accelerate launch` has not passed on a recipe that its config file names."""
    if _LAUNCHED not in environment:
        return
    path = _file_of_launcher()
    if path.is_file() and FSDP_KEY in path.read_text("utf-8"):
        _log.warning(
            "%s names a recipe by fsdp_config.%s, which `accelerate launch` does not pass on: "
            "rematic is off. Launch by `rematic launch`, or set %s.",
            path,
            FSDP_KEY,
            RECIPE,
        )


def _file_of_launcher() -> Path:
    """Returns the config file that the launcher of this process was given, or Accelerate's own."""
    import psutil
    from accelerate.commands.config.config_args import default_config_file

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():  # the nearest first
            arguments = process.cmdline()
            given = _value_of(_CONFIG_FILE, arguments)
            if given is not None and any("accelerate" in argument for argument in arguments):
                return Path(process.cwd(), given)
    return Path(default_config_file)


def _value_of(names: tuple[str, ...], arguments: list[str]) -> str | None:
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, is_joined, value = argument.partition("=")
        if name in names:
            return value if is_joined else following
    return None


def _truth(environment: Mapping[str, str], name: str) -> bool | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if text.lower() not in _WORDS:
        raise ValueError(
            f"{name} is {text!r}: expected true or false. Set one of them, or unset it."
        )
    return _WORDS[text.lower()]


def _overrides(environment: Mapping[str, str]) -> tuple[str, ...]:
    text = environment.get(OVERRIDES, "").strip()
    if not text:
        return ()
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(
            f"{OVERRIDES} is {text!r}: expected a JSON list of texts. Write for example "
            '["memory.budget=8GiB"], or unset it.'
        )
    return tuple(values)

"""What an Accelerate config file says about recomputation; the rest of it is not looked at."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rematic.hosts.recompute_environment import ENABLED, FSDP_KEY, OVERRIDES, RECIPE

SECTION = "recompute_config"
"""Key at the top of the file, for `rematic launch` only."""
FSDP_SECTION = "fsdp_config"
"""A section of Accelerate's in which every launcher lets other keys pass, `FSDP_KEY` among them."""
_KEYS = ("enabled", "recipe", "overrides")


@dataclass(frozen=True, kw_only=True)
class RecomputeSection:
    """The toggle of a file."""

    enabled: bool = True
    """Whether rematic does anything."""

    recipe: str = "auto"
    """Name or path of the recipe; paths are relative to where the launcher runs."""

    overrides: tuple[str, ...] = ()
    """`key=value` texts over it."""

    def environment(self) -> dict[str, str]:
        """Returns the variables by which scripts learn of it."""
        return {
            ENABLED: "true" if self.enabled else "false",
            RECIPE: self.recipe,
            OVERRIDES: json.dumps(list(self.overrides)),
        }


def load_accelerate_file(path: Path) -> dict[str, Any]:
    """Reads a file as Accelerate does: YAML, or JSON by its ending.

    Raises:
        ValueError: If there is no such file, or it cannot be parsed.
    """
    if not path.is_file():
        raise ValueError(
            f"there is no Accelerate config {path}; expected a file that `accelerate config` wrote"
        )
    text = path.read_text("utf-8")
    try:
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be parsed: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {found!r}; expected the keys of an Accelerate config")
    return found


def section_of(config: Mapping[str, Any], *, path: Path) -> RecomputeSection | None:
    """Returns what a file says, None if it says nothing.

    Args:
        config: The content of the file.
        path: Where it is, for messages.

    Raises:
        ValueError: If a key is unknown or has another type, or both places are used.
    """
    fsdp = config.get(FSDP_SECTION)
    recipe = fsdp.get(FSDP_KEY) if isinstance(fsdp, Mapping) else None
    if SECTION in config:
        if recipe is not None:
            raise ValueError(
                f"{path} has both {SECTION} and {FSDP_SECTION}.{FSDP_KEY}; expected one of the "
                "two. Remove the second."
            )
        return _read(config[SECTION] or {}, path=path)
    if recipe is None:
        return None
    return RecomputeSection(recipe=_typed(recipe, str, f"{FSDP_SECTION}.{FSDP_KEY}", path=path))


def _read(section: object, *, path: Path) -> RecomputeSection:
    values = _typed(section, dict, SECTION, path=path)
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{path}: {SECTION}.{key} is unknown{hint}; expected {', '.join(_KEYS)}"
            )
    overrides = _typed(values.get("overrides") or [], list, f"{SECTION}.overrides", path=path)
    return RecomputeSection(
        enabled=_typed(values.get("enabled", True), bool, f"{SECTION}.enabled", path=path),
        recipe=_typed(values.get("recipe") or "auto", str, f"{SECTION}.recipe", path=path),
        overrides=tuple(_typed(o, str, f"{SECTION}.overrides", path=path) for o in overrides),
    )


_NAMES = {str: "text", bool: "true or false", list: "a list of texts", dict: "keys and values"}


def _typed(value: object, kind: type, key: str, *, path: Path) -> Any:  # noqa: ANN401 - of that kind
    if not isinstance(value, kind):
        raise ValueError(f"{path}: {key} is {value!r}; expected {_NAMES[kind]}")
    return value

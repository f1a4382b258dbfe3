"""Finds recipes by name or path, and reads their text."""

from __future__ import annotations

import os
from pathlib import Path

from rematic.recipes.errors import RecipeError, nearest

MAX_FILE_BYTES = 256 * 1024
"""Size above which a file is taken for something else than a recipe."""

_SHIPPED = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


def list_recipes() -> tuple[str, ...]:
    """Names of the recipes that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def find_recipe(name_or_path: str | Path, *, folder: Path | None = None) -> Path:
    """Path of the file of a recipe; `folder` is where relative paths start.

    Text without a separator and without .yaml or .yml is the name of a shipped recipe.

    Raises:
        RecipeError: there is no such recipe or file.
    """
    text = os.fspath(name_or_path)
    if not isinstance(name_or_path, Path) and _is_name(text):
        return _find_shipped(text, folder=folder)
    path = Path(text).expanduser()
    path = path if folder is None else folder / path
    if os.path.isfile(path):  # unlike Path.is_file it answers for any text
        return path
    raise RecipeError(f"{text!r} is no recipe: {_why_no_file(path)}")


def _is_name(text: str) -> bool:
    return not text.endswith(_SUFFIXES) and not any(sign in text for sign in "/\\~")


def _find_shipped(name: str, *, folder: Path | None) -> Path:
    known = list_recipes()
    if name in known:
        return _SHIPPED / f"{name}.yaml"
    base = Path() if folder is None else folder
    names = [name + suffix for suffix in ("", *_SUFFIXES)]
    files = [file for file in names if os.path.isfile(base / file)]
    here = f"; to use the file of that name write ./{files[0]}" if files else ""
    raise RecipeError(
        f"{name!r} is not the name of a recipe{nearest(name, known)}; known recipes are"
        f" {', '.join(known)}; a file of your own needs its path, such as ./mine.yaml{here}"
    )


def _why_no_file(path: Path) -> str:
    if os.path.isdir(path):
        return "it is a folder; name a .yaml file in it"
    if os.path.lexists(path):
        return "it is not a regular file; copy the recipe to a .yaml file"
    known = list_recipes()
    try:
        siblings = [name for name in os.listdir(path.parent) if name.endswith(_SUFFIXES)]
    except OSError:
        siblings = []
    return (
        f"the file does not exist{nearest(path.name, (*siblings, *known))}; write the path of a"
        f" file, or the name of a known recipe: {', '.join(known)}"
    )


def display(path: Path) -> str:
    """The path as messages show it: relative where that is shorter to read."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return str(path) if relative.startswith(os.pardir) else relative


def read_text(path: Path) -> str:
    """The text of a recipe's file.

    Raises:
        RecipeError: it cannot be read, or is no text of a recipe's size.
    """
    name = display(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{name}: cannot be read ({error.strerror}); check the file") from error
    if len(content) > MAX_FILE_BYTES:
        raise RecipeError(
            f"{name}: larger than {MAX_FILE_BYTES} bytes; expected a recipe, a short YAML file"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{name}: not UTF-8 text (byte {error.start}); expected a recipe, a YAML file saved as"
            " UTF-8"
        ) from error
    if "\0" in text:
        raise RecipeError(f"{name}: a binary file; expected a recipe, a YAML file")
    return text

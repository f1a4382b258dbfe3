"""Loads recipes: files, what they extend, and overrides, as one checked `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rematic.recipes.budget import Budget, parse_budget
from rematic.recipes.errors import RecipeError
from rematic.recipes.layers import apply_override, merge
from rematic.recipes.recipe_files import display, find_recipe, read_text
from rematic.recipes.schema import Recipe
from rematic.recipes.tree import Origin, Tree, TreeEntry, TreeMap, TreeScalar
from rematic.recipes.typed_reader import Parser, read_tree
from rematic.recipes.yaml_text import parse_yaml

_OWN_KEYS = ("extends", "name", "description", "measured_on")
"""Keys that a recipe does not take over from the one it extends."""
_OWN_FIGURES = ("peak", "step_seconds", "tokens_per_second")
"""What it does not take over of `planned_on`: the device is meant for it too, the figures are of
another recipe."""


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a shipped recipe by name, or a file by path.

    Args:
        name_or_path: a name of `list_recipes`, a path (one that holds a separator or ends in
            .yaml or .yml), or `auto` for a recipe of defaults.
        overrides: `key=value` texts that win over the files, the last one over the others. The
            key is a path such as `training.epochs` or `policy.rules[0].match`, the value is YAML.

    Raises:
        RecipeError: the recipe, one it extends, or an override cannot be used as written.
    """
    return load_recipe_with_origins(name_or_path, overrides)[0]


def load_recipe_with_origins(
    name_or_path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Recipe, dict[str, Origin]]:
    """As `load_recipe`, and where each value was written, by its path in the recipe.

    Values that nobody wrote have the origin `default`.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides is the text {overrides!r}; expected a list of such texts")
    tree = _read_nothing() if name_or_path == "auto" else _read_composed(name_or_path)
    for number, text in enumerate(overrides, start=1):
        tree = apply_override(tree, text=text, number=number)
    parsers: dict[type, Parser] = {Budget: parse_budget}
    return read_tree(Recipe, tree, noun="a recipe", parsers=parsers, other_keys=("extends",))


def _read_nothing() -> TreeMap:
    return TreeMap(entries={}, origin=Origin(source="auto"))


def _read_composed(name_or_path: str | Path) -> TreeMap:
    return _compose(_read_chain(find_recipe(name_or_path)))


def _compose(chain: Sequence[tuple[Path, TreeMap]]) -> TreeMap:
    """Lay the recipes of a chain over one another; the first one wins."""
    path, top = chain[0]
    tree = _without(top, ("extends",))
    if "name" not in tree.entries:
        origin = Origin(source=display(path))
        name = TreeEntry(key_origin=origin, value=TreeScalar(value=path.stem, origin=origin))
        tree = TreeMap(entries={"name": name, **tree.entries}, origin=tree.origin)
    for _, below in chain[1:]:
        merged = merge(_inherited(below), tree)
        assert isinstance(merged, TreeMap)  # both are
        tree = merged
    return tree


def _inherited(tree: TreeMap) -> TreeMap:
    tree = _without(tree, _OWN_KEYS)
    planned = tree.entries.get("planned_on")
    if planned is None or not isinstance(planned.value, TreeMap):
        return tree
    device = replace(planned, value=_without(planned.value, _OWN_FIGURES))
    return TreeMap(entries={**tree.entries, "planned_on": device}, origin=tree.origin)


def _without(tree: TreeMap, keys: Sequence[str]) -> TreeMap:
    entries = {key: entry for key, entry in tree.entries.items() if key not in keys}
    return TreeMap(entries=entries, origin=tree.origin)


def _read_chain(path: Path) -> list[tuple[Path, TreeMap]]:
    """The recipe, the one it extends, and so on."""
    chain = [(path, _read_file(path))]
    while (extends := chain[-1][1].entries.get("extends")) is not None:
        parent = _find_parent(extends.value, folder=chain[-1][0].parent)
        before = [path for path, _ in chain]
        if parent.resolve() in [path.resolve() for path in before]:
            names = " -> ".join(display(path) for path in (*before, parent))
            raise RecipeError(
                f"{extends.value.origin}: extends: the recipe extends itself ({names}); remove one"
                " extends of this chain"
            )
        chain.append((parent, _read_file(parent)))
    return chain


def _find_parent(extends: Tree, *, folder: Path) -> Path:
    value = extends.value if isinstance(extends, TreeScalar) else None
    if not isinstance(value, str):
        raise RecipeError(
            f"{extends.origin}: extends: no recipe is named; expected the name of one recipe, or"
            " its path relative to this file"
        )
    try:
        return find_recipe(value, folder=folder)
    except RecipeError as error:
        raise RecipeError(f"{extends.origin}: extends: {error}") from error


def _read_file(path: Path) -> TreeMap:
    name = display(path)
    tree = parse_yaml(read_text(path), source=name)
    if tree is None:
        raise RecipeError(f"{name}: the file is empty; expected the keys of a recipe")
    if not isinstance(tree, TreeMap):
        raise RecipeError(
            f"{tree.origin}: no keys; expected those of a recipe at the top of the file, such as"
            " training: {epochs: 1}"
        )
    return tree

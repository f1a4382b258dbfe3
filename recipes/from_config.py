"""Recipes that another program has already read: OmegaConf (Hydra) configs and plain mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rematic.recipes.budget import Budget, parse_budget
from rematic.recipes.errors import RecipeError
from rematic.recipes.schema import Recipe
from rematic.recipes.tree import Origin, Tree, TreeEntry, TreeList, TreeMap, TreeScalar
from rematic.recipes.typed_reader import read_tree

if TYPE_CHECKING:
    from omegaconf import DictConfig


def recipe_from_config(config: DictConfig | Mapping[str, object]) -> Recipe:
    """Makes a recipe of a config, such as the `rematic` part of a Hydra run.

    The keys are those of a recipe's file, and they are checked as strictly; `extends` is not one of
    them, since a config is composed already. Interpolations are resolved.

    Raises:
        RecipeError: a key is unknown, a value has the wrong type or is missing.

    Examples:
        >>> from omegaconf import OmegaConf
        >>> config = OmegaConf.create({"memory": {"budget": "20GiB"}, "policy": {"start": "keep"}})
        >>> recipe_from_config(config).memory.budget.value
        21474836480
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain: object = config
    if isinstance(config, DictConfig):
        try:
            plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise RecipeError(f"config: {error}; give the value or remove the key") from error
    tree = _tree(plain, path="config")
    if not isinstance(tree, TreeMap):
        raise RecipeError(f"the config is {plain!r}; expected a mapping with the keys of a recipe")
    recipe, _ = read_tree(Recipe, tree, noun="a recipe", parsers={Budget: parse_budget})
    return recipe


def _tree(value: object, *, path: str) -> Tree:
    origin = Origin(source=path)
    if isinstance(value, Mapping):
        entries = {
            key: TreeEntry(key_origin=origin, value=_tree(item, path=f"{path}.{key}"))
            for key, item in value.items()
        }
        return TreeMap(entries=entries, origin=origin)
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = tuple(_tree(item, path=f"{path}[{i}]") for i, item in enumerate(value))
        return TreeList(items=items, origin=origin)
    if value is None or isinstance(value, (str, int, float, bool)):
        return TreeScalar(value=value, origin=origin)
    raise RecipeError(
        f"{path}: the value is {value!r}; expected text, a number, true, false or null"
    )

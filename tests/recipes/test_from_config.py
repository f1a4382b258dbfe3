"""Recipes from configs that another program has read."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from rematic.recipes import (
    KeepConfig,
    Recipe,
    RecipeError,
    RuleConfig,
    recipe_as_plain,
    recipe_from_config,
)


def test_a_config_becomes_the_recipe_of_its_values() -> None:
    config = OmegaConf.create(
        {
            "size": "20GiB",
            "rematic": {
                "memory": {"budget": "${size}"},
                "policy": {"rules": [{"match": "Block", "action": "keep", "first": 2}]},
            },
        }
    )
    recipe = recipe_from_config(config.rematic)
    assert recipe.memory.budget.value == 20 * 2**30
    assert recipe.policy.rules == (RuleConfig(match="Block", action=KeepConfig(), first=2),)


def test_a_plain_mapping_does_as_well_and_an_empty_one_is_auto() -> None:
    assert recipe_from_config({}) == Recipe()
    assert recipe_from_config({"training": {"epochs": 3}}).training.epochs == 3


def test_a_recipe_goes_through_omegaconf_and_back() -> None:
    recipe = recipe_from_config({"memory": {"budget": 0.5}, "data": {"max_length": 77}})
    config = OmegaConf.create(recipe_as_plain(recipe))
    assert isinstance(config, DictConfig)
    assert recipe_from_config(config) == recipe


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            {"memory": {"bugdet": 1000}},
            "config.memory: memory.bugdet is an unknown key, did you mean budget",
            id="unknown-key",
        ),
        pytest.param(
            {"training": {"epochs": "many"}},
            "config.training.epochs: training.epochs is 'many' (text)",
            id="wrong-type",
        ),
        pytest.param({"data": {"shuffle": {1, 2}}}, "config.data.shuffle: the value is", id="set"),
        pytest.param([1, 2], "the config is [1, 2]; expected a mapping", id="list"),
        pytest.param(
            OmegaConf.create({"training": {"epochs": "???"}}), "training.epochs", id="missing"
        ),
        pytest.param(
            OmegaConf.create({"training": {"epochs": "${nowhere}"}}), "nowhere", id="unresolved"
        ),
    ],
)
def test_configs_that_cannot_be_used(config: object, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_from_config(config)
    assert message in str(error.value)

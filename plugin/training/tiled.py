"""Decides whether head and loss run in slices."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedConfig

from rematic.recipes import Recipe
from rematic.recipes.policy_schema import TiledLoss

LARGE_VOCABULARY = 32_768
"""Tokens above which logits are larger than the activations of a few blocks."""


def choose_tiled_loss(recipe: Recipe, config: PreTrainedConfig) -> Recipe:
    """The recipe with `policy.tiled_loss` decided: by size where it says `auto`.

    Args:
        recipe: The recipe.
        config: Config of its model.
    """
    if recipe.policy.tiled_loss != "auto":
        return recipe
    has_head = recipe.model.task in ("causal-lm", "masked-lm")
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 0
    decided: TiledLoss = "always" if has_head and vocabulary > LARGE_VOCABULARY else "never"
    policy = dataclasses.replace(recipe.policy, tiled_loss=decided)
    return dataclasses.replace(recipe, policy=policy)

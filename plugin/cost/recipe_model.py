"""The model of a recipe as it is trained, without weights: quantized, with its adapter."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from rematic.recipes import Recipe
from rematic.recipes.model_schema import Attention
from rematic.training.adapters import add_adapter
from rematic.training.model import build_empty_model
from rematic.training.model_config import build_config
from rematic.training.tiled import choose_tiled_loss


@dataclass(frozen=True, kw_only=True)
class EmptyModel:
    """A model on the device `meta`, and what of its recipe depends on its config."""

    model: nn.Module
    """In training mode."""

    has_tiled_loss: bool
    """Whether its training computes the loss in slices."""


def empty_recipe_model(recipe: Recipe, *, max_length: int) -> EmptyModel:
    """Returns the model that `rematic train` trains, in shapes alone.

    Args:
        recipe: A recipe whose model is written out in it, or has its config on this machine.
        max_length: Longest sequence that it will be given, in tokens.

    Raises:
        ValueError: If the recipe names no model, transformers refuses it, a name fits no module,
            or bitsandbytes or PEFT is needed and missing.
    """
    # A CPU has not every kernel. Its own keeps what they keep: output and one number per query.
    attention: Attention = "eager" if recipe.model.attention == "eager" else "auto"
    written = dataclasses.replace(recipe.model, attention=attention)
    config = build_config(
        written, max_length=max_length, num_labels=len(recipe.data.labels) or None
    )
    model = build_empty_model(written, max_length=max_length, config=config)
    if recipe.weight_format != "none":
        from rematic.cost.empty_layers import quantize_empty

        quantize_empty(model, recipe.quantization, recipe.weight_format)
    if recipe.tuning.method != "full":
        with torch.device("meta"), warnings.catch_warnings():
            # PEFT 0.21 asks for a name that transformers 5.24 has replaced
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            model = add_adapter(model, recipe.tuning, source=recipe.model)
    decided = choose_tiled_loss(recipe, config).policy.tiled_loss
    return EmptyModel(model=model.train(), has_tiled_loss=decided == "always")

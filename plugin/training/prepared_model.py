"""The model of a recipe as it is trained: built or loaded, held in few bits, with its adapter."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from rematic.recipes import Recipe
from rematic.training.adapters import add_adapter, check_mergeable
from rematic.training.dtype_inventory import check_dtypes
from rematic.training.model import DTYPES, build_empty_model, build_model, load_model
from rematic.training.model_config import check_position_table
from rematic.training.model_size import ModelSize, size_of
from rematic.training.optimizer_memory import optimizer_state_bytes
from rematic.training.quantize import (
    check_quantizable,
    fused_experts,
    held_bytes,
    keep_layout,
    linears_to_quantize,
    quantize_experts,
    quantize_model,
)


def prepare_model(recipe: Recipe, *, config: PreTrainedConfig) -> nn.Module:
    """The model that a recipe trains, in training mode.

    Args:
        recipe: The recipe.
        config: The config of its model, as `build_config` gives it.

    Raises:
        ValueError: It cannot be built, loaded, quantized or adapted.
        RuntimeError: Weights are not of the type that the recipe says.
    """
    base = base_model(recipe, config=config)
    torch.manual_seed(recipe.training.seed)
    is_quantized = recipe.weight_format != "none"
    model = base
    if recipe.tuning.method != "full":
        model = add_adapter(base, recipe.tuning, source=recipe.model)
    check_dtypes(model, dtype=DTYPES[recipe.model.dtype], is_quantized=is_quantized)
    return model


def base_model(recipe: Recipe, *, config: PreTrainedConfig) -> nn.Module:
    """The model without its adapter, held as the recipe says."""
    form = recipe.weight_format
    if recipe.model.has_saved_weights:
        base = load_model(
            recipe.model, config=config, quantization=recipe.quantization, weight_format=form
        )
        if form != "none":
            quantize_experts(base, recipe.quantization, form)
    else:
        base = build_model(recipe.model, max_length=1, seed=recipe.training.seed, config=config)
        if form != "none":
            quantize_model(base, recipe.quantization, form)
    keep_layout(base)
    return base


def prepare_empty_model(recipe: Recipe, *, config: PreTrainedConfig) -> nn.Module:
    """The same on the device `meta`, in the type of the unquantized weights.

    It costs no memory, and finds the names in the recipe that fit nothing.

    Raises:
        ValueError: As `prepare_model`, as far as that can be told without weights.
    """
    model = build_empty_model(recipe.model, max_length=1, config=config)
    if recipe.weight_format != "none":
        check_quantizable(model, recipe.quantization, recipe.weight_format)
    if recipe.tuning.method != "full":
        model = add_adapter(model, recipe.tuning, source=recipe.model)
        if "merged" in recipe.saved:
            check_mergeable(model)
    return model


def measure_recipe(
    recipe: Recipe, *, config: PreTrainedConfig, max_length: int = 1, allow_code: bool = False
) -> ModelSize:
    """What the model of a recipe holds, found without allocating its weights.

    Args:
        recipe: The recipe.
        config: The config of its model.
        max_length: Longest sequence that it will be given, in tokens.
        allow_code: Whether `_target_` may name a class outside the allow-list.

    Raises:
        ValueError: As `prepare_empty_model`, its optimizer cannot be used, or the model has no
            positions for such sequences.
    """
    saved_bytes = _bytes_saved_by_quantization(recipe, config)
    model = prepare_empty_model(recipe, config=config)
    check_position_table(model, max_length=max_length)
    full = size_of(
        model,
        optimizer_bytes=optimizer_state_bytes(
            model.parameters(), recipe.training, allow_code=allow_code
        ),
    )
    return ModelSize(
        num_parameters=full.num_parameters,
        num_trainable=full.num_trainable,
        weight_bytes=full.weight_bytes - saved_bytes,
        gradient_bytes=full.gradient_bytes,
        optimizer_bytes=full.optimizer_bytes,
    )


def _bytes_saved_by_quantization(recipe: Recipe, config: PreTrainedConfig) -> int:
    form = recipe.weight_format
    if form == "none":
        return 0
    model = build_empty_model(recipe.model, max_length=1, config=config)
    packed = [linear.weight for _, linear in linears_to_quantize(model, recipe.quantization)]
    packed += [module.get_parameter(name) for module, name in fused_experts(model)]
    return sum(
        weight.nbytes - held_bytes(weight.numel(), recipe.quantization, form) for weight in packed
    )

"""The profile of the training that a recipe describes: no weights, no device, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from rematic.cost.batches import classified_batch, language_model_batch, packed_batch
from rematic.cost.profile import StepProfile
from rematic.cost.recipe_optimizer import parts_of, recipe_optimizer_bytes
from rematic.cost.sharding import shard_groups, sharded
from rematic.cost.step_trace import Batch
from rematic.cost.tracer import LOSSLESS, MakeBatch, TraceSettings, trace_profile
from rematic.policy import Action
from rematic.recipes import Recipe

_WITHOUT_MASKS = ("flash_attention_2", "flash_attention_3", "flex_attention")
"""Kernels that are told lengths, not masks of a number for each pair of tokens."""


def trace_recipe(
    recipe: Recipe,
    *,
    on_accelerator: bool,
    batch: int | None = 1,
    padded: Sequence[bool] = (False,),
    max_length: int | None = None,
    actions: Sequence[Action] = LOSSLESS,
) -> StepProfile:
    """Returns what a step of a recipe's training costs each of its processes.

    Args:
        recipe: A recipe whose model is written out in it.
        on_accelerator: Whether it will run on one; on a CPU the optimizer steps weight by weight.
        batch: Sequences in a micro-batch; None for a profile that holds for any number.
        padded: Kinds of padding to trace.
        max_length: Longest sequence to ask for; None for the recipe's `data.max_length`.
        actions: Actions to trace.

    Raises:
        ValueError: If the recipe names no model, transformers refuses it, or nothing is known of
            its optimizer.
    """
    from rematic.cost.recipe_model import empty_recipe_model  # needs transformers

    longest = recipe.data.max_length if max_length is None else max_length
    empty = empty_recipe_model(recipe, max_length=longest)
    settings = TraceSettings(
        loss=_loss,
        make_batch=_make_batch(recipe),
        actions=tuple(actions),
        batch=batch,
        padded=tuple(padded),
        max_length=longest,
        on_accelerator=on_accelerator,
        tile_tokens=0 if empty.has_tiled_loss else None,
    )
    return trace_as_trained(empty.model, recipe, settings)


def trace_as_trained(model: nn.Module, recipe: Recipe, settings: TraceSettings) -> StepProfile:
    """Returns what a step of a model costs each process that trains it as a recipe says.

    Args:
        model: The whole model, without weights.
        recipe: Its sections on training, processes and units count.
        settings: How it is run; what these sections say of it is filled in.

    Raises:
        ValueError: If nothing is known of the optimizer, or the model cannot be traced.
    """
    training, processes = recipe.training, recipe.distributed
    is_sharded = processes.strategy == "fsdp2" and processes.devices > 1
    accumulates = training.accumulate > 1
    weights = [*model.parameters()]
    filled_in = replace(
        settings,
        patterns=tuple(recipe.policy.units),
        autocast=torch.bfloat16 if training.precision == "bf16" else None,
        accumulates=accumulates and not is_sharded,
        gradient_buckets="copies" if processes.strategy == "ddp" else "none",
        optimizer=recipe_optimizer_bytes(
            training,
            parts_of(weights, processes.devices) if is_sharded else weights,
            on_accelerator=settings.on_accelerator,
        ),
    )
    profile = trace_profile(model, filled_in)
    if not is_sharded:
        return profile
    groups = shard_groups(model, profile.unit_names, num_parts=processes.devices)
    return sharded(profile, groups, accumulates=accumulates)


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    config = getattr(model, "config", None)
    options = {"use_cache": False} if hasattr(config, "use_cache") else {}
    loss: torch.Tensor = model(**batch, **options).loss
    return loss


def _make_batch(recipe: Recipe) -> MakeBatch:
    needs_masks = recipe.model.attention not in _WITHOUT_MASKS
    make: MakeBatch = language_model_batch
    if recipe.model.task == "sequence-classification":
        make = classified_batch
    elif recipe.data.packing and needs_masks:
        make = packed_batch
    return make if needs_masks else lambda batch, length, _: make(batch, length, False)

"""The profile of the training that a recipe describes: no weights, no device, no network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rematic.cost.batches import language_model_batch
from rematic.cost.optimizer_bytes import trace_optimizer
from rematic.cost.profile import StepProfile
from rematic.cost.tracer import LOSSLESS, TraceSettings, trace_profile
from rematic.policy import Action
from rematic.recipes import Recipe


def trace_recipe(
    recipe: Recipe,
    *,
    on_accelerator: bool,
    batch: int | None = 1,
    padded: Sequence[bool] = (False,),
    max_length: int | None = None,
    actions: Sequence[Action] = LOSSLESS,
) -> StepProfile:
    """Returns what a step of a recipe's training costs.

    The optimizer is that of `rematic train`: AdamW, fused on an accelerator.

    Args:
        recipe: A recipe whose model is written out in it.
        on_accelerator: Whether it will run on one; on a CPU the optimizer steps weight by weight.
        batch: Sequences in a micro-batch; None for a profile that holds for any number.
        padded: Kinds of padding to trace.
        max_length: Longest sequence to ask for; None for the recipe's `data.max_length`.
        actions: Actions to trace.

    Raises:
        ValueError: If the recipe names no model, or transformers refuses it.
    """
    from rematic.training.model import build_empty_model
    from rematic.training.optimization import build_optimizer

    longest = recipe.data.max_length if max_length is None else max_length
    model = build_empty_model(recipe.model, max_length=longest)
    training = recipe.training

    def make_optimizer(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(weights, training)
        for group in optimizer.param_groups:
            group["fused"] = True if on_accelerator else None
        return optimizer

    settings = TraceSettings(
        loss=lambda model, given: model(**given, use_cache=False).loss,
        make_batch=language_model_batch,
        actions=tuple(actions),
        batch=batch,
        padded=tuple(padded),
        max_length=longest,
        patterns=tuple(recipe.policy.units),
        autocast=torch.bfloat16 if training.precision == "bf16" else None,
        accumulates=training.accumulate > 1,
        on_accelerator=on_accelerator,
        optimizer=trace_optimizer(make_optimizer, model.parameters()),
    )
    return trace_profile(model, settings)

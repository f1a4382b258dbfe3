"""The profile of a model that a function of the user's makes: named by its import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rematic.cost.batches import language_model_batch
from rematic.cost.profile import StepProfile
from rematic.cost.recipe_optimizer import recipe_optimizer_bytes
from rematic.cost.step_trace import Batch
from rematic.cost.tracer import LOSSLESS, MakeBatch, TraceSettings, trace_profile
from rematic.recipes import Recipe


def trace_factory(
    path: str,
    recipe: Recipe,
    *,
    on_accelerator: bool,
    batch: int,
    padded: bool,
    max_length: int,
) -> StepProfile:
    """Returns what a step of the model costs that a factory makes.

    The factory is called with nothing, on the device `meta`, so that no weight is allocated. It
    returns an `nn.Module`, or a pair of one and a function `(batch, length) -> batch`. A
    LightningModule is run by its `training_step`, any other module by calling it with the batch;
    the loss is what that returns, its `loss`, or the entry of that name.

    Args:
        path: `package.module:name` of a function or class.
        recipe: Its policy and training sections count.
        on_accelerator: Whether the model will run on one.
        batch: Sequences in a micro-batch.
        padded: Whether a mask hides some tokens.
        max_length: Longest sequence to ask for.

    Raises:
        ValueError: If there is no such factory, or what it makes cannot be used.
    """
    factory = import_factory(path)
    with torch.device("meta"):
        made = factory()
    model, make_batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{path} returned a {type(model).__name__}; expected an nn.Module, or a pair of one "
            "and a function that makes a batch from batch size and length"
        )
    training = recipe.training
    settings = TraceSettings(
        loss=_loss_of(path),
        make_batch=language_model_batch if make_batch is None else _named(make_batch),
        actions=LOSSLESS,
        batch=batch,
        padded=(padded,),
        max_length=max_length,
        patterns=tuple(recipe.policy.units),
        autocast=torch.bfloat16 if training.precision == "bf16" else None,
        accumulates=training.accumulate > 1,
        on_accelerator=on_accelerator,
        optimizer=recipe_optimizer_bytes(
            training, list(model.parameters()), on_accelerator=on_accelerator
        ),
    )
    return trace_profile(model.train(), settings)


def import_factory(path: str) -> Callable[[], Any]:
    """Returns the function or class at an import path; the working folder is searched as well.

    Raises:
        ValueError: If there is none.
    """
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be imported ({error}); expected package.module:name of a function or "
            "class that returns the model when it is called with nothing"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return] # as checked


def _named(make: Callable[[int, int], object]) -> MakeBatch:
    """Lets a batch that is no mapping pass as one of a single entry."""

    def made(batch: int, length: int, padded: bool) -> Batch:
        given = make(batch, length)
        return given if isinstance(given, Mapping) else dict(_entries(given))

    return made


def _entries(given: object) -> Sequence[tuple[str, torch.Tensor]]:
    tensors = given if isinstance(given, (list, tuple)) else [given]
    return [(f"{_POSITION}{i}", tensor) for i, tensor in enumerate(tensors)]


_POSITION = "position "


def _loss_of(path: str) -> Callable[[nn.Module, Batch], torch.Tensor]:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        by_position = [value for name, value in batch.items() if name.startswith(_POSITION)]
        given: object = batch
        if by_position:
            given = by_position[0] if len(by_position) == 1 else tuple(by_position)
        step = getattr(model, "training_step", None)
        if callable(step):
            found = step(given, 0)
        elif by_position:
            found = model(*by_position)
        else:
            found = model(**batch)
        found = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", found)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ValueError(
                f"a step of the model of {path} returned no loss of one number; expected a tensor, "
                "an output with `loss`, or a LightningModule whose training_step returns one"
            )
        return found

    return loss

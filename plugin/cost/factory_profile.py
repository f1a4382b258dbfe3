"""The profile of a model that a function of the user's makes: named by its import path."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rematic.cost.batches import language_model_batch
from rematic.cost.profile import StepProfile
from rematic.cost.recipe_profile import trace_as_trained
from rematic.cost.step_trace import Batch
from rematic.cost.tracer import LOSSLESS, MakeBatch, TraceSettings
from rematic.policy import Action
from rematic.recipes import Recipe


def trace_factory(
    path: str,
    recipe: Recipe,
    *,
    on_accelerator: bool,
    batch: int,
    padded: Sequence[bool],
    max_length: int,
    actions: Sequence[Action] = LOSSLESS,
) -> StepProfile:
    """Returns what a step of the model costs that a factory makes.

    The factory is called with nothing, on the device `meta`, so that no weight is allocated. It
    returns an `nn.Module`, or a pair of one and a function `(batch, length) -> batch`. A
    LightningModule is run by its `training_step`, any other module by calling it with the batch;
    the loss is what that returns, its `loss`, or the entry of that name.

    Args:
        path: `package.module:name` of a function or class.
        recipe: What it says of training, processes and units counts.
        on_accelerator: Whether the model will run on one.
        batch: Sequences in a micro-batch.
        padded: Padding patterns to trace: whether a mask hides some tokens.
        max_length: Longest sequence to ask for.
        actions: Actions to trace.

    Raises:
        ValueError: If there is no such factory, or what it makes cannot be used.
    """
    model, make_batch = _made_by(path)
    settings = TraceSettings(
        loss=_loss_of(path),
        make_batch=language_model_batch if make_batch is None else _named(path, make_batch),
        actions=tuple(actions),
        batch=batch,
        padded=tuple(padded),
        max_length=max_length,
        on_accelerator=on_accelerator,
    )
    return trace_as_trained(model.train(), recipe, settings)


def _made_by(path: str) -> tuple[nn.Module, Callable[[int, int], object] | None]:
    factory = import_factory(path)
    with _told(path, "when it was called with nothing"), torch.device("meta"):
        made = factory()
    model, make_batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (make_batch is None or callable(make_batch)):
        raise ValueError(
            f"{path} returned {_kinds(made)}; expected an nn.Module, or a pair of one and a "
            "function that makes a batch from batch size and length"
        )
    return model, make_batch


def _kinds(made: object) -> str:
    if not isinstance(made, tuple):
        return f"a {type(made).__name__}"
    return f"a tuple of ({', '.join(type(one).__name__ for one in made)})"


@contextlib.contextmanager
def _told(path: str, when: str) -> Iterator[None]:
    """Says of an error in a user's code where it is.

    Raises:
        ValueError: Instead of any other error.
    """
    try:
        yield
    except Exception as error:  # a user's code raises anything
        text = " ".join(str(error).split())
        raise ValueError(
            f"{path} failed {when}: {type(error).__name__}: {text}{_place(error)}; expected an "
            "nn.Module or a LightningModule that runs without weights, device or Trainer"
        ) from error


def _place(error: Exception) -> str:
    """Returns the last line of the user's own code that an error came through, if it did."""
    roots = (Path(torch.__file__).parents[1], Path(__file__).parents[1])  # installed, and this
    ours = tuple(str(root.resolve()) for root in roots)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not str(Path(f.filename).resolve()).startswith(ours)]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


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
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(
            f"{path} cannot be imported ({type(error).__name__}: {error}); expected "
            "package.module:name of a function or class that returns the model when it is called "
            "with nothing"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return] # as checked


def _named(path: str, make: Callable[[int, int], object]) -> MakeBatch:
    """Lets a batch that is no mapping pass as one of a single entry."""

    def made(batch: int, length: int, padded: bool) -> Batch:
        with _told(path, f"when it made a batch of {batch} x {length}"):
            given = make(batch, length)
        named = given if isinstance(given, Mapping) else dict(_entries(given))
        for value in named.values():
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"a batch of {path} holds a {type(value).__name__}; expected a tensor, or a "
                    "list, tuple or dict of tensors"
                )
        return named

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
        with _told(path, "in a step"):
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
        if not found.requires_grad:
            raise ValueError(
                f"the loss of the model of {path} needs no gradient; expected weights that are "
                "trained (requires_grad), and a step outside of torch.no_grad"
            )
        return found

    return loss

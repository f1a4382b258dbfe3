"""Checks that a run can go on with a recipe, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rematic.journal import read_journal
from rematic.recipes import Recipe, load_recipe
from rematic.recipes.field_checks import spelled
from rematic.training.documents import Corpus
from rematic.training.examples import Encoded
from rematic.training.run_directory import RunDirectory

MUST_AGREE = (
    ("model", "task"),
    ("model", "type"),
    ("model", "config"),
    ("model", "id"),
    ("model", "path"),
    ("model", "revision"),
    ("model", "dtype"),
    ("tuning", "method"),
    ("tuning", "r"),
    ("tuning", "alpha"),
    ("tuning", "targets"),
    ("tuning", "modules_to_save"),
    ("tuning", "rslora"),
    ("quantization", "format"),
    ("quantization", "double"),
    ("quantization", "skip"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("data", "answers_only"),
    ("data", "max_length"),
    ("data", "overlong"),
    ("data", "order"),
    ("data", "batch_size"),
    ("data", "packing"),
    ("data", "mask_share"),
    ("evaluation", "source"),
    ("evaluation", "holdout"),
    ("training", "optimizer"),
    ("training", "seed"),
    ("training", "accumulate"),
    ("training", "precision"),
    ("distributed", "strategy"),
    ("distributed", "devices"),
)
"""What a checkpoint depends on; the rest of a recipe may change when a run is resumed."""

WITHOUT_EFFECT = (("run", "dir"), ("run", "name"))
"""What a run that is resumed cannot follow, which is said."""


def check_resumable(
    directory: RunDirectory,
    recipe: Recipe,
    *,
    corpus: Corpus,
    encoded: Encoded,
    notify: Callable[[str], None],
) -> None:
    """Refuses to go on with another model or other data than those of the run.

    Args:
        directory: The run.
        recipe: What it shall go on with.
        corpus: The data of that recipe.
        encoded: The sequences that it is trained in.
        notify: Is told of keys that have changed without effect.

    Raises:
        ValueError: They do not fit together.
    """
    before = load_recipe(directory.recipe.resolve())
    for section, key in MUST_AGREE:
        was, is_now = (getattr(getattr(r, section), key) for r in (before, recipe))
        if was != is_now:
            name, was, is_now = _first_difference(f"{section}.{key}", was, is_now)
            raise ValueError(
                f"{directory.path} cannot go on with recipe {recipe.name!r}: {name} is {is_now!r}, "
                f"the run was trained with {was!r}; expected the same model and data order: "
                f"resume with {directory.recipe}, or train anew without --resume"
            )
    trained_on = _noted(directory, "corpus_sha256")
    if trained_on and trained_on != corpus.sha256:
        raise ValueError(
            f"{directory.path} cannot go on with data.source {corpus.source!r}: its hash is "
            f"{corpus.sha256[:16]}, the run was trained on {trained_on[:16]}; expected the same "
            "documents (the embedded ones differ between Python versions): restore them, or train "
            "anew without --resume"
        )
    sequences = _noted(directory, "sequences_sha256")
    if sequences and sequences != encoded.sha256:
        raise ValueError(
            f"{directory.path} cannot go on with other sequences than those of the run, although "
            "the documents are the same: expected the same chat template and tokenizer, whose "
            "files must have changed: restore them, or train anew without --resume"
        )
    for section, key in WITHOUT_EFFECT:
        was, is_now = (getattr(getattr(r, section), key) for r in (before, recipe))
        if was != is_now:
            notify(
                f"{section}.{key} is {spelled(is_now)} and was {spelled(was)}, which has no effect "
                f"on a run that is resumed: it goes on in {directory.path}"
            )


def check_checkpoint(directory: RunDirectory, model: nn.Module) -> None:
    """Refuses a checkpoint that is damaged, or of other weights than a recipe trains.

    Args:
        directory: The run.
        model: The model of the recipe as it is trained; its weights need not exist.

    Raises:
        ValueError: The checkpoint cannot be used.
    """
    saved = _read_checkpoint(directory)["state_dict"]
    for name, parameter in model.named_parameters():
        shape = getattr(saved.get(f"model.{name}"), "shape", None)
        if parameter.requires_grad and shape != parameter.shape:
            has = "it lacks" if shape is None else f"it has {tuple(shape)} for"
            raise ValueError(
                f"{directory.checkpoint} is not of this model: {has} {name}, which is "
                f"{tuple(parameter.shape)}; expected the checkpoint of this run: put it back, or "
                "train anew without --resume"
            )


def _read_checkpoint(directory: RunDirectory) -> Mapping[str, Any]:
    try:
        # as a map of the file: what is not looked at is not read
        found = torch.load(directory.checkpoint, map_location="cpu", mmap=True, weights_only=True)
        missing = sorted({"state_dict", "optimizer_states", "lr_schedulers", "loops"} - set(found))
        reason = f"it has no {missing[0]}" if missing else ""
    except Exception as error:  # of torch, pickle, zipfile and the file system alike
        found, reason = {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason:
        raise ValueError(
            f"{directory.checkpoint} cannot be resumed from ({reason}); expected a checkpoint as "
            "rematic train writes it: put one back, or train anew without --resume"
        )
    checkpoint: Mapping[str, Any] = found
    return checkpoint


def steps_before(directory: RunDirectory) -> int | None:
    """The last step that the checkpoint holds, as the journal says; None where it does not."""
    step: int | None = None
    for event in read_journal(directory.journal):
        if event["event"] == "checkpoint" and isinstance(number := event.get("step"), int):
            step = number
    return step


def _first_difference(name: str, was: object, is_now: object) -> tuple[str, object, object]:
    if isinstance(was, dict) and isinstance(is_now, dict):
        for key in sorted({*was, *is_now}):
            if was.get(key) != is_now.get(key):
                return f"{name}.{key}", was.get(key), is_now.get(key)
    return name, was, is_now


def _noted(directory: RunDirectory, key: str) -> str:
    """What the run said last of its data when it began or went on; empty for nothing."""
    found = ""
    for event in read_journal(directory.journal):
        if event["event"] == "run_start" and isinstance(value := event.get(key), str):
            found = value
    return found

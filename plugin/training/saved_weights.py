"""Saves what was trained, as safetensors that transformers and PEFT load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rematic.recipes import Recipe
from rematic.training.adapters import add_adapter
from rematic.training.extras import import_extra
from rematic.training.model import DTYPES
from rematic.training.quantize import unpack_model
from rematic.whole_files import replaced_when_whole

ADAPTER_FOLDER = "adapter"
MERGED_FOLDER = "merged"
MODEL_FOLDER = "model"


def save_weights(
    recipe: Recipe,
    model: nn.Module,
    folder: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    tokenizer: Any = None,  # noqa: ANN401 - untyped in transformers
) -> list[Path]:
    """Saves the kinds of weights that a recipe asks for, each into a folder of its own.

    Merging changes the model, which is not trained any further.

    Args:
        recipe: The recipe.
        model: The model as it was trained.
        folder: Holds the folders.
        state: All its weights where the model itself has parts of them only (sharded models).
        tokenizer: Saved beside them, so that a folder can be used alone; None where it was bytes.

    Returns:
        The folders.
    """
    saved: list[Path] = []
    untyped: Any = model
    for kind in recipe.saved:
        if kind == "merged":
            path, written = folder / MERGED_FOLDER, merge_adapter(recipe, model)
        else:
            path = folder / (ADAPTER_FOLDER if kind == "adapter" else MODEL_FOLDER)
            written = untyped
        options = {} if state is None else {"state_dict": dict(state)}
        with replaced_when_whole(path) as unfinished:
            written.save_pretrained(unfinished / path.name, **options)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished / path.name)
        saved.append(path)
    return saved


def merge_adapter(recipe: Recipe, model: nn.Module) -> Any:  # noqa: ANN401 - of transformers
    """The model with its adapter added to its weights, in `model.dtype`.

    Packed weights are unpacked and not packed again, so that what was trained against them stays
    what it was. The model that is given is taken apart.
    """
    peft = import_extra("peft", extra="train", needed_by="run.save: merged")
    adapted: Any = model
    if recipe.weight_format == "none":
        return adapted.merge_and_unload()
    adapter = peft.get_peft_model_state_dict(adapted)
    base = adapted.unload()
    unpack_model(base, dtype=DTYPES[recipe.model.dtype])
    again: Any = add_adapter(base, recipe.tuning, source=recipe.model)
    peft.set_peft_model_state_dict(again, adapter)
    with torch.no_grad():
        return again.merge_and_unload()

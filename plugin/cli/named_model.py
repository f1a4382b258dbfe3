"""The model that somebody names on the command line, written out as a recipe says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rematic.recipes import ModelConfig, list_recipes, load_recipe
from rematic.recipes.model_schema import Task

_BOOKKEEPING = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype"),
        *("transformers_version", "use_cache", "id2label", "label2id", "problem_type"),
        *("attn_implementation", "quantization_config", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing"),
    }
)
"""Keys of a config that do not say what the model is."""


def model_named(name: str) -> ModelConfig:
    """Returns the model that is meant.

    Args:
        name: A shipped recipe or a file of one, whose model is taken; a folder with a
            `config.json`; or a model of the hub. One that a shipped recipe knows needs no network.

    Raises:
        ValueError: There is no such model, or its config cannot be read.
    """
    if name in list_recipes() or name.endswith((".yaml", ".yml")):
        return _written(load_recipe(name).model, name)
    if Path(name).expanduser().is_dir():
        return _read(ModelConfig(path=name))
    known = {recipe.model.id: recipe.model for recipe in map(load_recipe, list_recipes())}
    if name in known:
        return _written(known[name], name)
    return _read(ModelConfig(id=name), known=[one for one in known if one is not None])


def _written(model: ModelConfig, name: str) -> ModelConfig:
    if model.type is None:
        return _read(model)
    # What a recipe says of precision and kernels was right for its own device and method.
    return ModelConfig(
        task=model.task,
        type=model.type,
        config=model.config,
        id=model.id,
        path=model.path,
        revision=model.revision,
    )


def _read(model: ModelConfig, *, known: list[str] | None = None) -> ModelConfig:
    from rematic.training.model_config import load_config

    try:
        config = load_config(model)
    except ValueError as error:
        hint = f"; without a network these are known: {', '.join(sorted(known))}" if known else ""
        raise ValueError(f"{error}{hint}") from error
    return ModelConfig(
        task=task_of(str(config.model_type), getattr(config, "architectures", None) or ()),
        type=str(config.model_type),
        config=plain_config(config.to_diff_dict()),
        id=model.id,
        path=model.path,
        revision=model.revision,
    )


def task_of(model_type: str, architectures: Sequence[str]) -> Task:
    """Returns the task that a model was saved for, or else the one that its type is made for.

    Args:
        model_type: As transformers names it.
        architectures: Names of the classes in its config, such as `BertForMaskedLM`.
    """
    from rematic.training.tasks import TASKS

    for task, traits in TASKS.items():
        if traits.types.get(model_type) in architectures:
            return task
    fitting = [task for task, traits in TASKS.items() if model_type in traits.types]
    # encoders and pairs of encoder and decoder have heads of other tasks too
    made_for: tuple[Task, ...] = ("seq2seq", "masked-lm", "causal-lm")
    return next((task for task in made_for if task in fitting), "causal-lm")


def plain_config(values: Mapping[str, Any]) -> dict[str, object]:
    """Returns the keys of a config that say what the model is."""
    return {key: value for key, value in values.items() if key not in _BOOKKEEPING}

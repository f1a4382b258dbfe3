"""Builds the model of a recipe: random weights by its config, or saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rematic.recipes import ModelConfig, QuantizationConfig
from rematic.recipes.tuning_schema import WeightFormat
from rematic.training.model_config import (
    ATTENTION_KEY,
    build_config,
    cannot_load,
    hub_options,
    load_config,
    name_source,
    refusal,
    source_of,
)
from rematic.training.tasks import TASKS

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
}
"""Types of torch by the names of the schema."""


def build_model(
    model: ModelConfig, *, max_length: int, seed: int, config: PreTrainedConfig | None = None
) -> nn.Module:
    """The model of a recipe in training mode, its weights drawn from `seed`.

    Args:
        model: The model section of a recipe.
        max_length: Longest sequence that it will be given, in tokens.
        seed: Of its weights.
        config: Its config, if there is one already.

    Raises:
        ValueError: As `build_config`, or transformers cannot build a model of this config.
    """
    config = build_config(model, max_length=max_length) if config is None else config
    torch.manual_seed(seed)
    return _instantiate(model, config).train()


def build_empty_model(
    model: ModelConfig, *, max_length: int, config: PreTrainedConfig | None = None
) -> nn.Module:
    """The model of a recipe in training mode, on the device `meta`: shapes without weights."""
    config = build_config(model, max_length=max_length) if config is None else config
    with torch.device("meta"):
        return _instantiate(model, config).train()


def load_model(
    model: ModelConfig,
    *,
    config: PreTrainedConfig,
    quantization: QuantizationConfig,
    weight_format: WeightFormat,
) -> nn.Module:
    """The saved model that a recipe names, in training mode; weights are read from safetensors.

    Args:
        model: The model section of a recipe, with an id or a path.
        config: As `build_config` gives it; what was loaded with the weights is checked against it.
        quantization: How linear layers are held.
        weight_format: The same in a word.

    Raises:
        ValueError: The weights cannot be had, or are not those of the config.
    """
    saved = load_config(model)
    if config.num_labels is not None:
        saved.num_labels = config.num_labels
    if model.task == "sequence-classification" and getattr(saved, "pad_token_id", None) is None:
        saved.pad_token_id = getattr(config, "pad_token_id", None)
    options: dict[str, Any] = {**hub_options(model), **_attention(model)}
    if weight_format != "none":
        from rematic.training.quantize import load_options

        empty = build_empty_model(model, max_length=1, config=saved)
        options |= load_options(empty, quantization, weight_format)
    if str(saved.model_type).endswith("_text"):
        options["key_mapping"] = _NAMES_OF_TEXT_PARTS
    try:
        loaded, report = TASKS[model.task].auto_class.from_pretrained(
            source_of(model),
            config=saved,
            dtype=DTYPES[model.dtype],
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of hub, network, file system and transformers alike
        raise ValueError(cannot_load("the weights", model, error)) from error
    _check_complete(model, sorted(report["missing_keys"]))
    trained: nn.Module = loaded.train()
    return trained


def _check_complete(model: ModelConfig, missing: Sequence[str]) -> None:
    """Refuses weights of which transformers would draw a part at random; a new head may be."""
    if model.task == "sequence-classification":
        missing = [name for name in missing if name.partition(".")[0] not in _NEW_HEADS]
    if missing:
        raise ValueError(
            f"the weights of {name_source(model)} lack {len(missing)} tensors of a "
            f"{model.task} model, such as {missing[0]}, which would be random; expected all of "
            "them: name a model of that task and type"
        )


_NAMES_OF_TEXT_PARTS = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
"""How models that also see name the weights of their language model, and how it does by itself."""

_NEW_HEADS = ("score", "classifier", "classification_head", "pre_classifier", "head")


def name_attention(model: nn.Module) -> str:
    """The attention implementation that a model uses, as transformers names it."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "eager")


def describe_source(model: ModelConfig) -> str:
    """Where the weights come from, in words."""
    return name_source(model) if model.has_saved_weights else "random weights"


def _attention(model: ModelConfig) -> dict[str, str]:
    return {} if model.attention == "auto" else {ATTENTION_KEY: model.attention}


def _instantiate(model: ModelConfig, config: PreTrainedConfig) -> nn.Module:
    build = TASKS[model.task].auto_class.from_config
    try:
        built: nn.Module = build(config, dtype=DTYPES[model.dtype], **_attention(model))
    except Exception as error:  # KeyError, AssertionError, ImportError, ...
        if _attention(model) and "attention" in str(error).lower():
            text = " ".join(str(error).split())
            raise ValueError(
                f"model.attention is {model.attention!r}, which cannot be used here "
                f"({type(error).__name__}: {text}); expected one that is installed and that the "
                "model has: write auto"
            ) from error
        raise ValueError(refusal(str(config.model_type), error)) from error
    return built

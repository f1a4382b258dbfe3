"""Builds the model of a recipe: a causal language model with random weights."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rematic.byte_sizes import format_bytes
from rematic.recipes import ModelConfig
from rematic.training.byte_tokens import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE

ATTENTION_KEY = "attn_implementation"
"""Key of the model section that chooses the attention kernel instead of a config field."""

LEGACY_KEYS = frozenset({"rope_theta", "rope_scaling"})
"""Keys that transformers still converts, where the config has `rope_parameters`."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a model holds before it has trained."""

    num_parameters: int
    """Numbers in its parameters, each counted once."""
    num_trainable: int
    """Those of them that are trained."""
    weight_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    """Bytes of the gradients of one step."""

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the state of AdamW: two numbers for each that is trained."""
        return 2 * self.gradient_bytes

    @property
    def total_bytes(self) -> int:
        """Weights, gradients and optimizer state together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def build_config(model: ModelConfig, *, max_length: int) -> PreTrainedConfig:
    """The transformers config of a recipe's model, checked against what will be trained.

    Args:
        model: The model section of a recipe.
        max_length: Longest sequence that the model will be given, in tokens.

    Raises:
        ValueError: The type or a key is unknown, transformers refuses a value, or the model
            cannot read bytes or sequences of that length.
    """
    config = _make_config(model)
    vocabulary_size = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary_size, int) or vocabulary_size < VOCABULARY_SIZE:
        raise ValueError(
            f"model.config.vocab_size is {vocabulary_size}; the data is read as bytes, which needs "
            f"at least {VOCABULARY_SIZE} (256 bytes and 3 marks): write {VOCABULARY_SIZE}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < max_length:
        raise ValueError(
            f"data.max_length is {max_length}, but the model has positions for {positions} tokens; "
            f"write data.max_length={positions}, or raise model.config.max_position_embeddings"
        )
    return config


def build_model(model: ModelConfig, *, max_length: int, seed: int) -> nn.Module:
    """The model of a recipe in training mode, its weights drawn from `seed`.

    Raises:
        ValueError: As `build_config`, or transformers cannot build a model of this config.
    """
    config = build_config(model, max_length=max_length)
    torch.manual_seed(seed)
    return _instantiate(model, config).train()


def measure_model(model: ModelConfig, *, max_length: int) -> ModelSize:
    """The size of a recipe's model, found without allocating its weights."""
    return size_of(build_empty_model(model, max_length=max_length))


def build_empty_model(model: ModelConfig, *, max_length: int) -> nn.Module:
    """The model of a recipe in training mode, on the device `meta`: shapes without weights."""
    config = build_config(model, max_length=max_length)
    with torch.device("meta"):
        return _instantiate(model, config).train()


def size_of(module: nn.Module) -> ModelSize:
    """The size of a model that exists; shared parameters count once."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return ModelSize(
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_trainable=sum(p.numel() for p in trainable),
        weight_bytes=sum(t.nbytes for t in [*module.parameters(), *module.buffers()]),
        gradient_bytes=sum(p.nbytes for p in trainable),
    )


def check_budget(size: ModelSize, *, budget_bytes: int) -> None:
    """Refuses a budget in which no step fits, whatever happens to the activations.

    Raises:
        ValueError: The budget does not even hold the weights, or not what an optimizer step needs.
    """
    if budget_bytes < size.weight_bytes:
        problem = f"the model's own weights ({format_bytes(size.weight_bytes)})"
    elif budget_bytes < size.total_bytes:
        problem = (
            f"weights, gradients and optimizer state ({format_bytes(size.weight_bytes)} + "
            f"{format_bytes(size.gradient_bytes)} + {format_bytes(size.optimizer_bytes)})"
        )
    else:
        return
    raise ValueError(
        f"memory.budget is {format_bytes(budget_bytes)}, which is smaller than {problem}; "
        f"expected more than {format_bytes(size.total_bytes)}, and activations come on top: "
        "raise memory.budget or make the model smaller"
    )


def _make_config(model: ModelConfig) -> PreTrainedConfig:
    if model.type is None:
        raise ValueError(
            "the recipe names no model; expected model.type, for example model.type=llama"
        )
    if model.type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model.type {model.type!r} is not a causal language model of transformers; expected a "
            f"type such as llama or gpt2{_suggest(model.type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}"
        )
    keys = {key: value for key, value in model.config.items() if key != ATTENTION_KEY}
    _check_keys(model.type, keys)
    marks = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    try:
        return AutoConfig.for_model(model.type, **{**marks, **keys})
    except Exception as error:  # transformers raises a dozen kinds for a bad value
        raise ValueError(_refusal(model.type, error)) from error


def _check_keys(model_type: str, keys: Mapping[str, object]) -> None:
    """Refuses unknown keys, which transformers keeps without a word and without effect."""
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    if "rope_parameters" in known:
        known |= LEGACY_KEYS
    for key in keys:
        if key not in known:
            raise ValueError(
                f"model.config has no key {key!r} for type {model_type!r}{_suggest(key, known)}; "
                f"expected one of {', '.join(sorted({*known, ATTENTION_KEY}))}"
            )


def _instantiate(model: ModelConfig, config: PreTrainedConfig) -> nn.Module:
    attention = model.config.get(ATTENTION_KEY)
    options = {} if attention is None else {ATTENTION_KEY: attention}
    try:
        build = AutoModelForCausalLM.from_config  # untyped in transformers
        built: nn.Module = build(config, **options)  # type: ignore[no-untyped-call]
    except Exception as error:  # as above: KeyError, AssertionError, ImportError, ...
        raise ValueError(_refusal(str(model.type), error)) from error
    return built


def _refusal(model_type: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        f"transformers refuses model.config for type {model_type!r} "
        f"({type(error).__name__}: {text}); correct the value it names"
    )


def _suggest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""

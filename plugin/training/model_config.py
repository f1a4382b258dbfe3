"""The config of a recipe's model: written out in the recipe, from the hub, or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from rematic.recipes import ModelConfig
from rematic.recipes.errors import nearest
from rematic.training.byte_tokens import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE
from rematic.training.tasks import TASKS

ATTENTION_KEY = "attn_implementation"
"""What transformers calls the choice of the attention kernel."""

LEGACY_KEYS = frozenset({"rope_theta", "rope_scaling"})
"""Keys that transformers still converts, where the config has `rope_parameters`."""

_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call how many experts a block has."""


def build_config(
    model: ModelConfig,
    *,
    max_length: int,
    num_tokens: int | None = None,
    num_labels: int | None = None,
    marks: Mapping[str, int | None] | None = None,
) -> PreTrainedConfig:
    """The transformers config of a recipe's model, checked against what will be trained.

    A config that is written out is taken where there is one, so that nothing else is needed.

    Args:
        model: The model section of a recipe.
        max_length: Longest sequence that the model will be given, in tokens.
        num_tokens: Size of the vocabulary that the data needs; None: that of bytes.
        num_labels: Classes of the data; None: what the config says.
        marks: Ids of the tokens that mark padding, beginning and end; None: those of bytes.

    Raises:
        ValueError: The type or a key is unknown, transformers refuses a value, or the model
            cannot read the tokens or sequences of that length.
    """
    given = BYTE_MARKS if marks is None else marks
    if model.type is None and model.has_saved_weights:
        config = load_config(model)
    else:
        config = _make_config(model, marks=given)
        _check_parts(config.get_text_config())
    if num_labels is not None:
        config.num_labels = num_labels
    if model.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = given["pad_token_id"]  # tells where a sequence ends
    _check_vocabulary(config, num_tokens=num_tokens)
    _check_positions(config, max_length=max_length)
    return config


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """The config that comes with the weights; it must agree with what the recipe writes out.

    Raises:
        ValueError: It cannot be had, or differs.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source_of(model), **hub_options(model)
        )
    except Exception as error:  # of hub, network, file system and transformers alike
        raise ValueError(cannot_load("the config", model, error)) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{name_source(model)} holds weights that are quantized already; expected the model "
            "they were made from: name that, and let quantization.format say how it is held"
        )
    if is_text_part(model, config):
        config = config.text_config
    if model.type is not None:
        _check_agreement(model, config)
    return config


def is_text_part(model: ModelConfig, saved: PreTrainedConfig) -> bool:
    """Whether the recipe means the language model inside a saved one that also sees or hears."""
    inner = getattr(saved, "text_config", None)
    return inner is not None and saved.model_type != model.type and inner.model_type == model.type


def source_of(model: ModelConfig) -> str:
    """Name on the hub, or folder."""
    if model.path is None:
        assert model.id is not None, "the caller asks for saved weights only"
        return model.id
    folder = Path(model.path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path is {model.path!r}, where there is no config.json; expected the folder of "
            "a model as save_pretrained leaves it"
        )
    return str(folder)


def hub_options(model: ModelConfig) -> dict[str, Any]:
    """What every call that loads something of the model is told."""
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def name_source(model: ModelConfig) -> str:
    """The key and value that say where the weights are."""
    return f"model.id {model.id!r}" if model.id is not None else f"model.path {model.path!r}"


def cannot_load(what: str, model: ModelConfig, error: Exception) -> str:
    """Text of the error for something that comes with the weights and cannot be loaded."""
    text = " ".join(str(error).split())[:400]
    if "trust_remote_code" in str(error):
        remedy = "where you trust that code, write model.trust_remote_code: true"
    elif model.id is not None:
        remedy = (
            "check the name, this machine's network and its access to gated models; without a "
            "network name a folder by model.path"
        )
    else:
        remedy = "name the folder of a model as save_pretrained leaves it"
    kind = type(error).__name__
    return f"{what} of {name_source(model)} cannot be loaded ({kind}: {text}); {remedy}"


BYTE_MARKS = {
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "cls_token_id": BOS_ID,
    "sep_token_id": EOS_ID,
}


def _check_vocabulary(config: PreTrainedConfig, *, num_tokens: int | None) -> None:
    size = getattr(config.get_text_config(), "vocab_size", None)
    needed = VOCABULARY_SIZE if num_tokens is None else num_tokens
    if isinstance(size, int) and size >= needed:
        return
    what = (
        f"the data is read as bytes, which needs at least {VOCABULARY_SIZE} (256 bytes and 3 marks)"
        if num_tokens is None
        else f"the tokenizer has {num_tokens} tokens"
    )
    raise ValueError(f"model.config.vocab_size is {size}; {what}: write {needed}")


def _check_parts(config: PreTrainedConfig) -> None:
    """Refuses numbers that do not fit together and that transformers finds in the first step."""
    heads, shared = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    if heads and shared is not None and (shared < 1 or heads % shared):
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"model.config.num_key_value_heads is {shared}, which does not divide "
            f"num_attention_heads ({heads}) evenly; write one of {fitting}"
        )
    chosen = _number(config, "num_experts_per_tok")
    counts = (_number(config, key) for key in _EXPERTS_KEYS)
    experts = next((count for count in counts if count is not None), None)
    if chosen and experts is not None and chosen > experts:
        raise ValueError(
            f"model.config.num_experts_per_tok is {chosen}, but there are {experts} experts; "
            f"write at most {experts}, or raise their number"
        )


def _number(config: PreTrainedConfig, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def positions_of(model: ModelConfig) -> int | None:
    """The longest sequence that a model written out in a recipe has positions for, in tokens.

    None where it has no such bound.

    Raises:
        ValueError: As `build_config`.
    """
    return _number(_make_config(model, marks={}).get_text_config(), "max_position_embeddings")


def _check_positions(config: PreTrainedConfig, *, max_length: int) -> None:
    positions = _number(config.get_text_config(), "max_position_embeddings")
    if positions is not None and positions < max_length:
        raise ValueError(_too_long(max_length, positions))


def check_position_table(model: nn.Module, *, max_length: int) -> None:
    """Refuses sequences that are longer than a table of positions with rows for padding.

    Models such as RoBERTa count positions from behind the row of padding, so that of
    `max_position_embeddings` rows some are for no token.

    Args:
        model: A model of transformers; its weights need not exist.
        max_length: Longest sequence that it will be given, in tokens.

    Raises:
        ValueError: There are fewer rows than tokens.
    """
    for name, table in model.named_modules():
        is_table = isinstance(table, nn.Embedding) and "position" in name.rpartition(".")[2]
        if isinstance(table, nn.Embedding) and is_table and table.padding_idx is not None:
            positions = table.num_embeddings - table.padding_idx - 1
            if positions < max_length:
                raise ValueError(_too_long(max_length, positions))


def _too_long(max_length: int, positions: int) -> str:
    return (
        f"the longest sequence has {max_length} tokens, but the model has positions for "
        f"{positions} tokens; write data.max_length={max(positions, 2)} (less where "
        "data.pad_to_multiple rounds up), or raise model.config.max_position_embeddings"
    )


def _make_config(model: ModelConfig, *, marks: Mapping[str, int | None]) -> PreTrainedConfig:
    traits = TASKS[model.task]
    if model.type is None:
        raise ValueError(
            "the recipe names no model; expected model.type, for example model.type=llama, or "
            "model.id or model.path for one with weights"
        )
    if model.type not in traits.types:
        raise ValueError(
            f"model.type {model.type!r} is not a {traits.words} of transformers; expected a "
            f"type such as {traits.example}{_suggest(model.type, traits.types)}"
        )
    _check_keys(model.type, model.config)
    marks = {key: value for key, value in marks.items() if _has_mark(model.type, key)}
    try:
        config = AutoConfig.for_model(model.type, **{**marks, **model.config})
    except Exception as error:  # transformers raises a dozen kinds for a bad value
        raise ValueError(refusal(model.type, error)) from error
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 does, whose files say so
    return config


def _has_mark(model_type: str, key: str) -> bool:
    """Whether configs of a type say where the beginning and the end of encoders are."""
    return key not in ("cls_token_id", "sep_token_id") or hasattr(
        AutoConfig.for_model(model_type), key
    )


def _check_keys(model_type: str, keys: Mapping[str, object]) -> None:
    """Refuses unknown keys, which transformers keeps without a word and without effect."""
    if ATTENTION_KEY in keys:
        raise ValueError(
            f"model.config.{ATTENTION_KEY} is {keys[ATTENTION_KEY]!r}; expected nothing there: "
            "write model.attention"
        )
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    if "rope_parameters" in known:
        known |= LEGACY_KEYS
    for key in keys:
        if key not in known:
            raise ValueError(
                f"model.config has no key {key!r} for type {model_type!r}{_suggest(key, known)}; "
                f"expected one of {', '.join(sorted(known))}"
            )


def _check_agreement(model: ModelConfig, saved: PreTrainedConfig) -> None:
    if saved.model_type != model.type:
        raise ValueError(
            f"model.type is {model.type!r}, but {name_source(model)} is of type "
            f"{saved.model_type!r}; write that, or remove type and config"
        )
    written = _make_config(model, marks={})
    for key in model.config:
        mine, theirs = getattr(written, key, None), getattr(saved, key, None)
        if mine != theirs and key not in LEGACY_KEYS:
            raise ValueError(
                f"model.config.{key} is {mine!r}, but {name_source(model)} has {theirs!r}; write "
                "that, or remove type and config"
            )


def refusal(model_type: str, error: Exception) -> str:
    """Text of the error for a config that transformers does not take."""
    text = " ".join(str(error).split())
    return (
        f"transformers refuses model.config for type {model_type!r} "
        f"({type(error).__name__}: {text}); correct the value it names"
    )


def _suggest(word: str, known: Mapping[str, object] | set[str]) -> str:
    near = nearest(word, known)
    return near.replace("did you mean ", "did you mean '").replace("?", "'?")

"""Tiny models of the architectures of transformers, with random weights.

A default config is shrunk field by field: what its name says (a width, a depth, a number of heads,
a vocabulary) decides the value. Where the result makes no model, the error says why.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.architecture_batches import VOCABULARY

MAX_PARAMETERS = 3_000_000
_WIDTH = 32
_HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "PRETRAINING",
)
"""The tasks whose class stands for an architecture: the first one that it has."""

_ID = -1
# globs over names of fields, and the most that the field may be; the first match counts
_SIZES: tuple[tuple[str, int], ...] = (
    ("*vocab_size *vocab_size_* *n_vocab num_embeddings *_group_vocab", VOCABULARY),
    ("codebook_size num_codevectors_per_group context_size", 16),
    ("num_image_tokens image_seq_length", 4),
    ("*token_id *token_ids *token_index *_id *_token *_index", _ID),
    ("*experts_per_tok *experts_per_token moe_topk moe_k", 2),
    ("n_group n_groups num_expert_group topk_group *num_query_groups mamba_n_groups", 1),
    ("*num_experts num_local_experts n_routed_experts zero_expert_num index_topk", 4),
    ("first_k_dense_replace moe_layer_start_index num_first_* num_last_* num_hash_functions", 1),
    ("insert_layer_id attn_layer_offset expert_layer_offset", 1),
    ("num_kv_shared_layers", 0),
    ("linear_num_value_heads linear_num_key_heads linear_num_heads", 2),
    ("mamba_num_heads mamba_n_heads n_mamba_heads", 8),
    ("*num_key_value_heads *num_kv_heads num_key_value_attention_heads", 2),
    ("*attention_heads *num_heads *n_heads *n_head *_heads", 4),
    ("n_layers_per_* num_layers_per_stack moe_layer_freq attn_layer_period layer_group_size", 2),
    ("num_feat_extract_layers", 7),
    ("*num_hidden_layers *num_layers *_layers *n_layer depth layers num_blocks *_per_block", 3),
    ("*intermediate_size *ffn_dim mlp_dim d_ff *feedforward *ffn_hidden_size d_inner n_inner", 48),
    ("*feed_forward_size dim_ff dff expert_dim *feedforward_dim *intermediate_dim *_units", 48),
    ("qk_head_dim *rank", 16),
    ("rotary_dim *head_dim *head_size d_kv d_head kv_channels mamba_d_head *headdim dim_head", 8),
    ("mamba_d_ssm", 64),
    ("*state *state_size *sliding_window* attention_window* local_attention *window_size", 8),
    ("*chunk_size num_frames", 4),
    ("n_embd dim d_model *hidden_size* *hidden_dim *embed_dim *embedding_dim *emb_dim", _WIDTH),
    ("*embedding_size *projection_dim *proj_dim *project_dim lru_width codebook_dim", _WIDTH),
    ("x4_dim conv_dim mask_dim enc_dim *output_dim *hidden_channels d_latents emb_size", _WIDTH),
    ("codevector_dim classifier_proj_size *_conv_channels *filters pooler_output_size", _WIDTH),
    ("num_conv_pos_embeddings patch_size encoder_stride", 8),
    ("num_conv_pos_embedding_groups", 4),
    ("*image_size img_size crop_size", 32),
    ("*max_position_embeddings *_positions n_positions n_ctx max_seq_len *context_length", 64),
    ("*seq_len model_max_length *position_embedding* original_max* *seq_length block_size", 64),
    ("num_queries num_denoising num_detection_tokens num_query_tokens *n_latents *num_latents", 6),
    ("depthwise_separable_out_channel ext_pw_out_channel", 16),
)
_DEPTHS = "*layers *depth *depths *n_layer num_blocks blocks_per_stage block_sizes"
_DROPOUTS = "*dropout *drop *drop_rate *drop_path_rate *layerdrop *dropout_rate *_prob"
_WIDTHS = "*hidden_sizes *embed_dims *dims *channels conv_dim tdnn_dim embed_dim_per_stage"
_KINDS_OF_LAYERS = "layer_types layers_block_type mlp_layer_types block_types"
_DERIVED = frozenset({"out_features", "out_indices", "stage_names", "per_layer_config"})
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "levit": {"drop_path_rate": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True},
    "swin": {"embed_dim": 24, "window_size": 4, "patch_size": 2},
    "swinv2": {"embed_dim": 24, "window_size": 4, "patch_size": 2},
    "timesformer": {"drop_path_rate": 0},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
}
"""Fields that names do not decide, by architecture."""


def model_types() -> list[str]:
    """Returns the name of every architecture that has a model class."""
    return [name for name in CONFIG_MAPPING if any(name in table for table in _tables())]


def tiny_model(model_type: str, attention: str, *, dropout: float = 0.1) -> nn.Module:
    """Builds a small model in training mode, the same one for the same seed.

    Args:
        model_type: Name of the architecture.
        attention: `eager` or `sdpa`.
        dropout: Wherever the config has one.

    Raises:
        Exception: As the config or the model raises it.
        ValueError: If it is not small.
    """
    config = _tiny_config(model_type, attention, dropout)
    make = getattr(transformers, _class_of(model_type))
    try:
        with torch.device("meta"):
            _refuse_large(make(copy.deepcopy(config)))
    except (NotImplementedError, RuntimeError, TypeError):
        pass  # some cannot be made there
    model: nn.Module = make(config).float()
    _refuse_large(model)
    return model.train()


def _refuse_large(model: nn.Module) -> None:
    number = sum(parameter.numel() for parameter in model.parameters())
    if number > MAX_PARAMETERS:
        raise ValueError(f"shrinks to {number:,} parameters only, of {MAX_PARAMETERS:,} allowed")


def _tables() -> list[Mapping[str, Any]]:
    names = [
        n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")
    ]
    tables = [getattr(modeling_auto, name) for name in names]
    return sorted(tables, key=lambda table: table is not modeling_auto.MODEL_MAPPING_NAMES)


def _class_of(model_type: str) -> str:
    of_tasks = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in _HEADS]
    entry = next(table[model_type] for table in of_tasks + _tables() if model_type in table)
    return entry if isinstance(entry, str) else entry[-1]


def _tiny_config(model_type: str, attention: str, dropout: float) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    fields = {**_shrunk(config_class().to_dict(), dropout), **_OWN.get(model_type, {})}
    fields.pop("transformers_version", None)
    config = config_class.from_dict(fields)
    for part in _parts(config):
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and "rope_theta" in rope:
            rope.setdefault("mrope_section", [2, 1, 1])
    config._attn_implementation = attention
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            yield from _parts(part)


def _shrunk(fields: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    small = {
        name: _small(str(name), value, dropout)
        for name, value in fields.items()
        if name not in _DERIVED
    }
    kv, heads = "num_key_value_heads", "num_attention_heads"
    if kv in fields and fields[kv] == fields.get(heads):
        small[kv] = small[heads]
    return small


def _small(name: str, value: Any, dropout: float) -> Any:  # noqa: ANN401 - a field's value
    if isinstance(value, Mapping):
        return value if name in ("id2label", "label2id") else _shrunk(value, dropout)
    if isinstance(value, (list, tuple)) and value:
        return _small_list(name, list(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if _is_one_of(_DROPOUTS, name):
        return dropout
    return _small_number(name, value) if isinstance(value, int) else value


def _is_one_of(globs: str, name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs.split())


@functools.cache
def _limit(name: str) -> int | None:
    return next((size for globs, size in _SIZES if _is_one_of(globs, name)), None)


def _small_number(name: str, value: int) -> int:
    limit = _limit(name)
    if limit is None or value <= 0:
        return value
    if limit != _ID:
        return min(value, limit)
    if value < 3:
        return value
    return 3 + value % 2 if "pad" in name else 5 + value % 40  # not among the words of a batch


def _small_list(name: str, value: list[Any]) -> list[Any]:
    if _is_one_of(_KINDS_OF_LAYERS, name):
        kinds = list(dict.fromkeys(value))
        return (kinds * 3)[:3] if len(kinds) <= 3 else kinds
    if name == "mrope_section":
        return [2, 1, 1]
    if not all(isinstance(one, int) for one in value):
        return value
    if _is_one_of(_DEPTHS, name):
        return [min(one, 2) for one in (value if len(value) <= 6 else value[:3])]
    if _is_one_of(_WIDTHS, name) and max(value) > 64:
        unit = max(value) // 64
        return [max(8, one // unit // 8 * 8) for one in value]
    if name.endswith(("indexes", "indices", "idxs")):
        return sorted({min(one, 2) for one in value})
    if name.endswith("_per_layer") or (name == "intermediate_size" and len(value) > 6):
        return [_small_number(name.removesuffix("_per_layer"), one) for one in value[:3]]
    return value[:3] if len(value) > 20 else value

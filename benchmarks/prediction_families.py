"""Small models of many shapes, for `prediction.py`: classes of transformers, random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 1000


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model and its batches."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, bool], Batch]
    """From batch size, length and padding."""
    lengths: tuple[int, ...] = (160, 256, 420, 700)
    batches: tuple[int, ...] = (1, 2)
    paddings: tuple[bool, ...] = (False, True)
    adapters: tuple[str, ...] = ()
    """Modules that LoRA adapts; none: full fine-tuning only."""
    trace: Mapping[str, object] = field(default_factory=dict)
    """More settings of the trace."""
    apart: bool = False
    """Whether its errors are told apart, since a prediction cannot know what decides them."""


def _tokens(batch: int, length: int, padded: bool) -> Batch:
    ids = torch.randint(3, VOCABULARY, (batch, length))
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - length // 4 :] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def _images(batch: int, length: int, padded: bool) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.zeros(batch).long()}


def _decoder(config: str, model: str, **changes: object) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    }
    return lambda: getattr(transformers, model)(
        getattr(transformers, config)(**{**sizes, **changes})
    )


def _mixtral(**changes: object) -> nn.Module:
    return _decoder(
        "MixtralConfig",
        "MixtralForCausalLM",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        output_router_logits=False,
        **changes,
    )()


def _unbalanced(model: nn.Module) -> nn.Module:
    """Sends every token to the same two of four experts: all are equally likely to its routers."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(parameter)
    return model


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = (
    Family(
        name="llama",
        build=_decoder("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, use_cache=False),
        batch=_tokens,
        adapters=_PROJECTIONS,
    ),
    Family(  # large enough that Python's own objects are little beside its tensors
        name="llama-512",
        build=_decoder(
            "LlamaConfig",
            "LlamaForCausalLM",
            hidden_size=512,
            intermediate_size=1408,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        ),
        batch=_tokens,
        lengths=(512, 1024),
        batches=(1,),
        paddings=(False,),
    ),
    Family(
        name="qwen3",
        build=_decoder(
            "Qwen3Config", "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=32, use_cache=False
        ),
        batch=_tokens,
        adapters=_PROJECTIONS,
    ),
    Family(
        name="gemma3",
        build=_decoder(
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=256,
            use_cache=False,
        ),
        batch=_tokens,
        adapters=_PROJECTIONS,
    ),
    Family(
        name="gpt2",
        build=lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=128,
                n_layer=8,
                n_head=4,
                n_positions=2048,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        ),
        batch=_tokens,
        adapters=("c_attn",),
    ),
    Family(
        name="bert",
        build=_decoder("BertConfig", "BertForMaskedLM"),
        batch=_tokens,
        adapters=("query", "value"),
    ),
    Family(
        name="modernbert",
        build=_decoder(
            "ModernBertConfig",
            "ModernBertForMaskedLM",
            local_attention=128,
            reference_compile=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        batch=_tokens,
        adapters=("Wqkv",),
    ),
    Family(
        name="t5",
        build=lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY,
                d_model=128,
                d_kv=32,
                d_ff=352,
                num_layers=5,
                num_decoder_layers=5,
                num_heads=4,
                use_cache=False,
                decoder_start_token_id=0,
            )
        ),
        batch=_tokens,
        lengths=(160, 240, 320, 440),
        adapters=("q", "v"),
    ),
    Family(
        name="vit",
        build=lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=8,
                num_attention_heads=4,
                image_size=64,
                patch_size=4,
                num_labels=10,
            )
        ),
        batch=_images,
        lengths=(64,),
        batches=(1, 3, 4, 8),
        paddings=(False,),
        adapters=("q_proj", "v_proj"),
    ),
    Family(name="mixtral", build=_mixtral, batch=_tokens, adapters=("q_proj", "v_proj")),
    Family(
        name="mixtral-unbalanced",
        build=lambda: _unbalanced(_mixtral()),
        batch=_tokens,
        apart=True,
    ),
    Family(
        name="mixtral-loop-unbalanced",
        build=lambda: _unbalanced(_mixtral(experts_implementation="eager")),
        batch=_tokens,
        apart=True,
    ),
)
"""Every family."""

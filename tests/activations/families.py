"""Small models of every kind that rematic meets, with a batch and a loss for each.

Tests of the engine take them as parameters: a family added here is covered by all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, its batches, its loss, and the units that the default search must find."""

    name: str
    """Name, the id of the parameter."""

    build: Callable[[], nn.Module]
    """Makes the model; the caller seeds the generator."""

    batch: Callable[[torch.Generator], Batch]
    """Makes one batch."""

    loss: Callable[[nn.Module, Batch], torch.Tensor]
    """Runs the forward pass and returns a scalar."""

    units: tuple[str, ...]
    """Qualified names of the default units."""

    def __str__(self) -> str:
        return self.name


class ResidualBlock(nn.Module):
    """A residual MLP with an in-place activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class NormBlock(nn.Module):
    """Running statistics, a spectral norm that changes the buffers it reads, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = spectral_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


class Stack(nn.Module):
    """A projection, a stack of blocks, a head."""

    def __init__(self, make_block: Callable[[int], nn.Module], *, width: int, depth: int) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(make_block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.inp(x)))


class Encoder(nn.Module):
    """An embedding, `nn.TransformerEncoder` with dropout, a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=mask))


def _vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(6, 8, generator=generator)
    return {"x": x, "labels": torch.randint(0, 3, (6,), generator=generator)}


def _tokens(generator: torch.Generator) -> Batch:
    """Token ids `(2, 7)`, the second sequence padded on the left."""
    ids = torch.randint(0, 11, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def _encode(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"] == 0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _language_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss  # use_cache is left at its default
    return loss


def build_llama(attention: str, **changes: Any) -> nn.Module:
    """Returns a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1 if attention == "eager" else 0.0,
    }
    config = LlamaConfig(**{**sizes, **changes}, attn_implementation=attention)
    return LlamaForCausalLM(config).train()


def build_gpt2(depth: int = 3) -> nn.Module:
    """Returns a GPT-2 with random weights and its usual dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11,
        n_positions=32,
        n_embd=8,
        n_layer=depth,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).train()


def _names(pattern: str, number: int = 3) -> tuple[str, ...]:
    return tuple(pattern.format(i) for i in range(number))


MLP = Family(
    name="mlp",
    build=lambda: Stack(ResidualBlock, width=8, depth=3),
    batch=_vectors,
    loss=_classify,
    units=_names("blocks.{}"),
)
NORMS = Family(
    name="batch-norm",
    build=lambda: Stack(NormBlock, width=8, depth=3),
    batch=_vectors,
    loss=_classify,
    units=_names("blocks.{}"),
)
ENCODER = Family(
    name="transformer-encoder",
    build=Encoder,
    batch=_tokens,
    loss=_encode,
    units=_names("encoder.layers.{}"),
)
LLAMA_EAGER = Family(
    name="llama-eager",
    build=functools.partial(build_llama, "eager"),
    batch=_tokens,
    loss=_language_model,
    units=_names("model.layers.{}"),
)
LLAMA_SDPA = Family(
    name="llama-sdpa",
    build=functools.partial(build_llama, "sdpa"),
    batch=_tokens,
    loss=_language_model,
    units=_names("model.layers.{}"),
)
GPT2 = Family(
    name="gpt2",
    build=build_gpt2,
    batch=_tokens,
    loss=_language_model,
    units=_names("transformer.h.{}"),
)
FAMILIES = (MLP, NORMS, ENCODER, LLAMA_EAGER, LLAMA_SDPA, GPT2)
"""Every family."""

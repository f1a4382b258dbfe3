"""Tiny language models of transformers, a batch, and a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True}


def build(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def llama(**changes: Any) -> nn.Module:
    return build("Llama", **changes)


def batch(length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**batch(), **more)
    output.loss.backward()
    return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(found: Any, wanted: Any, *, limit: float = 2e-6) -> None:
    (output, gradients), (plain_output, plain_gradients) = found, wanted
    assert output.loss.dtype == plain_output.loss.dtype
    assert output.loss.item() == pytest.approx(plain_output.loss.item(), rel=1e-6)
    assert gradients.keys() == plain_gradients.keys()
    largest = max(float(g.norm()) for g in plain_gradients.values())
    for name, gradient in plain_gradients.items():
        allowed = limit * max(float(gradient.norm()), 0.1 * largest)
        assert float((gradients[name] - gradient).norm()) <= allowed, name

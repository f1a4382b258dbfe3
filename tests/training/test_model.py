from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec

import pytest
import torch

from rematic.recipes import ModelConfig
from rematic.training.model import build_empty_model, build_model, name_attention
from rematic.training.model_config import build_config
from rematic.training.model_size import check_budget, size_of

TINY = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny(**changes: object) -> ModelConfig:
    return ModelConfig(type="llama", config={**TINY, **changes})


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (build_model(tiny(), max_length=8, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.parameters(), same.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    assert first.training


def test_measures_a_model_without_its_weights() -> None:
    built = build_model(tiny(), max_length=8, seed=0)
    size = size_of(build_empty_model(tiny(), max_length=8))
    assert size == size_of(built)
    assert size.num_parameters == sum(p.numel() for p in built.parameters())
    assert size.gradient_bytes == 4 * size.num_parameters
    assert size.optimizer_bytes == 8 * size.num_parameters


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = build_model(tiny(), max_length=8, seed=0)
    model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    size = size_of(model)
    assert size.num_parameters - size.num_trainable == 259 * 32
    assert size.gradient_bytes == 4 * size.num_trainable


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), "the recipe names no model; expected model.type"),
        (
            ModelConfig(type="lama"),
            "model.type 'lama' is not a causal language model of transformers; expected a type "
            "such as llama or gpt2, did you mean 'llama'?",
        ),
        (ModelConfig(type="vit"), "model.type 'vit' is not a causal language model"),
        (
            tiny(hiden_size=4),
            "model.config has no key 'hiden_size' for type 'llama', did you mean 'hidden_size'?; "
            "expected one of ",
        ),
        (
            tiny(hidden_size="x"),
            "transformers refuses model.config for type 'llama' "
            "(StrictDataclassFieldValidationError: Validation error for field 'hidden_size'",
        ),
        (tiny(hidden_size=30, num_attention_heads=4), "not a multiple of the number of attention"),
        (
            tiny(num_attention_heads=4, num_key_value_heads=3),
            "model.config.num_key_value_heads is 3, which does not divide num_attention_heads (4) "
            "evenly; write one of 1, 2, 4",
        ),
        (
            ModelConfig(type="mixtral", config={"num_local_experts": 2, "num_experts_per_tok": 3}),
            "model.config.num_experts_per_tok is 3, but there are 2 experts; write at most 2",
        ),
        (tiny(vocab_size=256), "vocab_size is 256; the data is read as bytes, which needs at"),
        (
            tiny(max_position_embeddings=7),
            "the longest sequence has 8 tokens, but the model has positions for 7 tokens; write "
            "data.max_length=7 (less where data.pad_to_multiple rounds up), or raise",
        ),
    ],
    ids=[
        "none",
        "near",
        "vision",
        "key",
        "type",
        "heads",
        "shared",
        "experts",
        "vocabulary",
        "positions",
    ],
)
def test_refuses_what_cannot_be_trained(model: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_config(model, max_length=8)


def test_refuses_a_value_that_only_building_finds() -> None:
    with pytest.raises(ValueError, match=r"refuses model.config for type 'llama' \(KeyError"):
        build_model(tiny(hidden_act="nope"), max_length=8, seed=0)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_an_attention_that_is_not_installed_is_named() -> None:
    chosen = dataclasses.replace(tiny(), attention="flash_attention_2", dtype="bf16")
    with pytest.raises(
        ValueError, match=r"'flash_attention_2', which cannot be used here \(Import"
    ):
        build_empty_model(chosen, max_length=8)


def test_accepts_keys_that_transformers_still_converts() -> None:
    config = build_model(tiny(rope_theta=5.0), max_length=8, seed=0).config
    assert config.rope_parameters["rope_theta"] == 5.0  # type: ignore[union-attr, index]


def test_the_attention_is_chosen_in_one_place() -> None:
    chosen = dataclasses.replace(tiny(), attention="eager")
    assert name_attention(build_model(chosen, max_length=8, seed=0)) == "eager"
    assert name_attention(build_model(tiny(), max_length=8, seed=0)) == "sdpa"
    with pytest.raises(ValueError, match=r"attn_implementation is 'eager'; expected"):
        build_config(tiny(attn_implementation="eager"), max_length=8)


def test_accepts_the_aliases_of_a_config() -> None:
    config = build_config(
        ModelConfig(type="gpt2", config={"hidden_size": 24, "vocab_size": 259, "n_head": 2}),
        max_length=8,
    )
    assert config.n_embd == 24


def test_a_budget_must_hold_more_than_the_model() -> None:
    size = size_of(build_model(tiny(), max_length=8, seed=0))
    check_budget(size, budget_bytes=size.total_bytes)
    with pytest.raises(ValueError, match=r"smaller than weights, gradients and optimizer state"):
        check_budget(size, budget_bytes=size.total_bytes - 1)
    with pytest.raises(ValueError, match=r"smaller than the model's own weights \(.*\); expected"):
        check_budget(size, budget_bytes=size.weight_bytes - 1)

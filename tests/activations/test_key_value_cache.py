"""Caches in training: an empty one is left out, a filled one is kept (C2)."""

from __future__ import annotations

from typing import Any

import torch

from rematic.activations.key_value_cache import without_empty_caches
from tests.activations.families import build_llama
from tests.activations.parity import attached


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self, *_: Any) -> None:
        raise AssertionError("not in training")


def test_an_empty_cache_is_left_out() -> None:
    x = torch.ones(1)
    args, kwargs, filled = without_empty_caches((x, Cache(0)), {"past": Cache(0), "other": 3})
    assert args[0] is x
    assert (args[1], kwargs, filled) == (None, {"past": None, "other": 3}, False)


def test_a_filled_cache_is_kept() -> None:
    caches = (Cache(0), Cache(4))
    args, kwargs, filled = without_empty_caches(caches, {"past": caches[1]})
    assert args == caches
    assert kwargs == {"past": caches[1]}
    assert filled


def test_other_arguments_are_not_touched() -> None:
    args, kwargs = (torch.ones(1), {"update": 1}), {"x": None}
    assert without_empty_caches(args, kwargs) == (args, kwargs, False)


def test_the_setting_of_the_model_is_left_alone_and_generation_uses_its_cache() -> None:
    """A model that trains under rematic generates as before, in between and after."""
    torch.manual_seed(0)
    model = build_llama("sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    ids = torch.randint(0, 11, (1, 4))
    model.eval()
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert model.config.use_cache is True
    with attached(model, kept=False) as engine:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        model.eval()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
        assert engine.units[0].num_forwards == 1, "generation makes no record"
    assert model.config.use_cache is True
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)

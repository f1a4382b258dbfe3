from __future__ import annotations

import pytest

from rematic.recipes import ModelConfig
from tests.recipes.refusals import assert_refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task": "causal"},
            "task is 'causal'; expected one of causal-lm, masked-lm, seq2seq,"
            " sequence-classification; write causal-lm where unsure",
        ),
        (
            {"id": "a/b", "path": "folder"},
            "path is 'folder'; expected null, since id is 'a/b'; remove one of the two",
        ),
        (
            {"revision": "v1", "path": "folder"},
            "revision is 'v1'; expected null, since no id names a model of the hub; remove it, or"
            " write id",
        ),
        (
            {"type": "llama", "trust_remote_code": True},
            "trust_remote_code is true; expected false, since neither id nor path is given and no"
            " code comes with a config; remove it",
        ),
        ({"dtype": "fp16"}, "dtype is 'fp16'; expected one of fp32, bf16; write fp32 where unsure"),
        (
            {"attention": "flash"},
            "attention is 'flash'; expected one of auto, eager, sdpa, flash_attention_2,"
            " flash_attention_3, flex_attention; write auto where unsure",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused(values: dict[str, object], message: str) -> None:
    assert_refused(ModelConfig, values, message=message)


def test_weights_are_loaded_or_drawn() -> None:
    assert not ModelConfig(type="llama").has_saved_weights
    assert ModelConfig(id="a/b", type="llama", config={"hidden_size": 8}).has_saved_weights
    assert ModelConfig(path="folder").has_saved_weights

"""The page of recipes names every key with its default, and its examples are recipes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import rematic
from rematic.policy import ACTIONS, OP_GROUPS
from rematic.recipes import Recipe, load_recipe, recipe_as_plain

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text("utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = [f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "description")]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_keys_and_defaults_are_those_of_the_schema(section: str) -> None:
    table = PAGE.partition(f"### {section}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.MULTILINE)
    assert {key: yaml.safe_load(default) for key, default in rows} == (
        recipe_as_plain(Recipe())[section]
    )


def test_every_action_and_every_short_name_of_an_op_is_there() -> None:
    table = PAGE.partition("| action | options |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w+]+)` \|", table, re.MULTILINE) == list(ACTIONS)
    assert [name for name in OP_GROUPS if f"`{name}`" not in table] == []


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_fit_a_model(text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(text)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=8, **sizes))
    session = rematic.attach(model, recipe=load_recipe(path), budget="1GiB")
    assert len(session.policy.rules) == text.count("match:")
    session.detach()

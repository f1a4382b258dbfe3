from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable

import pytest

from rematic import recipes
from rematic.recipes import (
    ControlConfig,
    DataConfig,
    KeepConfig,
    MemoryConfig,
    ModelConfig,
    PolicyConfig,
    Recipe,
    RecomputeConfig,
    RuleConfig,
    RunConfig,
    TileConfig,
    TrainingConfig,
)
from rematic.recipes.budget import Budget
from rematic.recipes.field_checks import FieldError

_NAME = (
    "expected 1 to 100 letters, digits, spaces and . _ + -, the first a letter or digit; write a"
    " name that a folder can have, such as tiny-cpu"
)
_BLANK = "expected text that is not blank"


@pytest.mark.parametrize(
    ("schema_class", "values", "message"),
    [
        (ModelConfig, {"type": ""}, f"type is ''; {_BLANK}; write a model type such as llama"),
        (
            ModelConfig,
            {"config": {"hidden_size": 8}},
            "config is {'hidden_size': 8}; expected no keys, since there is no type whose keys they"
            " could be; name the type, such as type: llama, or remove config",
        ),
        (
            ModelConfig,
            {"type": "llama", "config": {"torch_dtype": object}},
            "config is {'torch_dtype': <class 'object'>}; expected names with plain values: text,"
            " numbers, truth values, null, lists and mappings; write other values as transformers"
            " writes them to JSON, such as 'bfloat16'",
        ),
        (
            DataConfig,
            {"source": " "},
            f"source is ' '; {_BLANK}; write pydoc_topics, a path, or a dataset's name",
        ),
        (
            DataConfig,
            {"text_field": ""},
            f"text_field is ''; {_BLANK}; name the key that holds the text, such as text",
        ),
        (
            DataConfig,
            {"max_length": 1},
            "max_length is 1; expected a whole number of at least 2; write the longest sequence in"
            " tokens",
        ),
        (
            DataConfig,
            {"max_documents": 0},
            "max_documents is 0; expected a whole number of at least 1; write null for all"
            " documents",
        ),
        (
            DataConfig,
            {"packing": 1},
            "packing is 1; expected a truth value; write true or false",
        ),
        (
            TrainingConfig,
            {"epochs": 0},
            "epochs is 0; expected a whole number of at least 1; write max_steps for less than one"
            " epoch",
        ),
        (
            TrainingConfig,
            {"epochs": True},
            "epochs is true; expected a whole number of at least 1; write max_steps for less than"
            " one epoch",
        ),
        (
            TrainingConfig,
            {"max_steps": -1},
            "max_steps is -1; expected a whole number of at least 1; write null to end by epochs",
        ),
        (
            TrainingConfig,
            {"learning_rate": 0.0},
            "learning_rate is 0.0; expected a finite number above 0; write for example 3.0e-4",
        ),
        (
            TrainingConfig,
            {"learning_rate": float("inf")},
            "learning_rate is inf; expected a finite number above 0; write for example 3.0e-4",
        ),
        (
            TrainingConfig,
            {"weight_decay": -0.1},
            "weight_decay is -0.1; expected a finite number of at least 0; write 0 for none",
        ),
        (
            TrainingConfig,
            {"warmup_steps": -1},
            "warmup_steps is -1; expected a whole number of at least 0; write 0 for none",
        ),
        (
            TrainingConfig,
            {"clip_norm": 0.0},
            "clip_norm is 0.0; expected a finite number above 0; write null for none",
        ),
        (
            TrainingConfig,
            {"accumulate": 0},
            "accumulate is 0; expected a whole number of at least 1; write 1 for a step after each"
            " micro-batch",
        ),
        (
            TrainingConfig,
            {"precision": "fp16"},
            "precision is 'fp16'; expected one of fp32, bf16; write fp32 where unsure",
        ),
        (
            TrainingConfig,
            {"seed": 2**32},
            "seed is 4294967296; expected a whole number from 0 to 4294967295; write for example 0",
        ),
        (
            TrainingConfig,
            {"threads": 0},
            "threads is 0; expected a whole number of at least 1; write null for torch's own"
            " choice",
        ),
        (
            MemoryConfig,
            {"budget": "700MiB"},
            "budget is '700MiB'; expected an instance of Budget; make one by"
            " parse_budget('700MiB')",
        ),
        (
            MemoryConfig,
            {"probe": "gpu"},
            "probe is 'gpu'; expected one of auto, host, cuda, simulated; write auto where unsure",
        ),
        (
            MemoryConfig,
            {"heap_cap": "no"},
            "heap_cap is 'no'; expected a truth value; write true or false",
        ),
        (
            MemoryConfig,
            {"heap_cap": True, "probe": "cuda"},
            "heap_cap is true; expected false, since probe is cuda and only the heap of a CPU has a"
            " cap; write heap_cap: false, or probe: host",
        ),
        (
            MemoryConfig,
            {"reserve": 1.0},
            "reserve is 1.0; expected a number of at least 0 and below 1; write a fraction such as"
            " 0.05",
        ),
        (
            RuleConfig,
            {"match": "", "action": KeepConfig()},
            f"match is ''; {_BLANK}; write a pattern such as 'model.layers.*'",
        ),
        (
            RuleConfig,
            {"match": "x", "action": "keep"},
            "action is 'keep'; expected an instance of KeepConfig or SelectiveConfig or "
            "RecomputeConfig or RecomputeOffloadConfig or OffloadConfig or CompressConfig or "
            "TileConfig; write RecomputeConfig()",
        ),
        (
            TileConfig,
            {"tile_tokens": 512, "num_tiles": 4},
            "num_tiles is 4; expected null, since tile_tokens is 512; remove one of the two",
        ),
        (
            PolicyConfig,
            {"start": "full"},
            "start is 'full'; expected one of planned, keep, selective, recompute, "
            "recompute+offload, offload, compress; write planned where unsure",
        ),
        (
            PolicyConfig,
            {"start": "compress"},
            "start is 'compress'; expected a lossless policy, since allow_lossy is false; write"
            " allow_lossy: true, or name compress in a rule",
        ),
        (
            PolicyConfig,
            {"units": "model.layers.*"},
            "units is 'model.layers.*'; expected a tuple of str; write patterns such as"
            " ['model.layers.*']",
        ),
        (
            PolicyConfig,
            {"units": ("a", "")},
            "units is ('a', ''); expected patterns that are not blank; write each as text such as"
            " 'model.layers.*', or leave the list empty",
        ),
        (
            PolicyConfig,
            {"rules": ({"match": "x"},)},
            "rules is ({'match': 'x'},); expected a tuple of RuleConfig; write"
            " (RuleConfig(match=..., action=...),)",
        ),
        (
            PolicyConfig,
            {"op_retry": "no"},
            "op_retry is 'no'; expected one of auto, always, never; write auto where unsure",
        ),
        (
            ControlConfig,
            {"attempts": 0},
            "attempts is 0; expected a whole number of at least 1; write 1 for no second try",
        ),
        (RunConfig, {"dir": ""}, f"dir is ''; {_BLANK}; write a folder such as runs"),
        (RunConfig, {"name": "a/b"}, f"name is 'a/b'; {_NAME}"),
        (
            RunConfig,
            {"checkpoint_every_steps": 0},
            "checkpoint_every_steps is 0; expected a whole number of at least 1; write null for one"
            " checkpoint at the end",
        ),
        (Recipe, {"name": ".."}, f"name is '..'; {_NAME}"),
        (Recipe, {"name": "a."}, f"name is 'a.'; {_NAME}"),
        (Recipe, {"name": None}, f"name is null; {_NAME}"),
        (
            Recipe,
            {"description": "a\nb"},
            "description is 'a\\nb'; expected one line of text; move the rest to a comment",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_that_a_section_refuses(
    schema_class: Callable[..., object], values: dict[str, object], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        schema_class(**values)
    assert str(caught.value) == message
    assert caught.value.field == message.split()[0]


@pytest.mark.parametrize(
    ("schema_class", "values"),
    [
        (ModelConfig, {"type": "llama", "config": {"a": [1, {"b": None, 0: 1.5}], "c": True}}),
        (DataConfig, {"max_length": 2, "max_documents": 1}),
        (TrainingConfig, {"clip_norm": None, "weight_decay": 0, "seed": 2**32 - 1}),
        (MemoryConfig, {"reserve": 0, "heap_cap": True, "probe": "host"}),
        (RunConfig, {"name": "Läufe 1.0+x_y-z"}),
        (Recipe, {"name": "a" * 100, "description": "one line\n"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_at_the_edge_are_taken(
    schema_class: Callable[..., object], values: dict[str, object]
) -> None:
    config = schema_class(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_a_recipe_without_arguments_has_the_documented_defaults() -> None:
    recipe = Recipe()
    assert recipe.name == "auto"
    assert recipe.model == ModelConfig(type=None, config={})
    assert recipe.data == DataConfig(source="pydoc_topics", max_length=1024, order="shuffled")
    assert recipe.training == TrainingConfig(learning_rate=3e-4, clip_norm=1.0, precision="fp32")
    assert recipe.memory == MemoryConfig(budget=Budget(kind="auto"), probe="auto", reserve=0.05)
    assert recipe.policy == PolicyConfig(start="planned", units=(), rules=(), op_retry="auto")
    assert recipe.control == ControlConfig(attempts=4)
    assert recipe.run == RunConfig(dir="runs", name=None, checkpoint_every_steps=None)


def test_a_recipe_travels_to_another_process() -> None:
    recipe = Recipe(
        model=ModelConfig(type="llama", config={"hidden_size": 8}),
        policy=PolicyConfig(rules=(RuleConfig(match="x", action=RecomputeConfig()),)),
    )
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert copy.deepcopy(recipe) == recipe


def _schema_classes() -> list[type]:
    return [one for one in vars(recipes).values() if dataclasses.is_dataclass(one)]  # type: ignore[misc]


@pytest.mark.parametrize("schema_class", _schema_classes(), ids=lambda one: one.__name__)
def test_every_class_is_frozen_and_every_field_says_what_it_is(schema_class: type) -> None:
    (body,) = ast.parse(inspect.getsource(schema_class)).body
    assert isinstance(body, ast.ClassDef)
    assert "frozen=True, kw_only=True" in ast.unparse(body.decorator_list[0])
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr), f"{ast.unparse(statement)} has no docstring"
            docstring = ast.literal_eval(following.value)
            assert re.fullmatch(r"[^\n]+\.", docstring)

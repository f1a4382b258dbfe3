from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.recipes import (
    Budget,
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
    TrainingConfig,
    format_recipe,
    load_recipe,
    load_recipe_with_origins,
    recipe_as_plain,
)

# What a YAML file can hold as text, less the mark of an interpolation.
_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["C"]) | st.sampled_from("\n\t\x07"),
    max_size=12,
)
_TEXT = _TEXT.map(lambda text: text.replace("${", "$"))
_TRAPS = st.sampled_from(["no", "on", "null", "~", "010", "1_0", "12:30:45", "3e4", ".inf", "<<"])
_TRAPS |= st.sampled_from(["*a", "&a", "!a", "- a", "a: b", "a #b", " a", "a ", "'", '"', "", "|"])
_WORDS = _TEXT | _TRAPS
_FILLED = _WORDS.filter(lambda text: bool(text.strip()))
_NAMES = st.from_regex(r"[A-Za-z0-9_](?:[A-Za-z0-9_ .+-]{0,20}[A-Za-z0-9_+-])?", fullmatch=True)
_SMALL = st.integers(1, 10**6)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(_WORDS | st.integers(), values, max_size=3)
    ),
    max_leaves=8,
)
_BUDGETS = (
    st.just(Budget())
    | st.builds(Budget, kind=st.just("absolute"), value=st.integers(1, 2**60))
    | st.builds(Budget, kind=st.just("fraction"), value=st.floats(1e-9, 1.0))
)
_RULES = st.builds(
    RuleConfig, match=_FILLED, action=st.sampled_from([KeepConfig(), RecomputeConfig()])
)
_RECIPES = st.builds(
    Recipe,
    name=_NAMES,
    description=_WORDS.filter(lambda text: "\n" not in text.strip()),
    model=st.builds(ModelConfig, type=_FILLED, config=st.dictionaries(_WORDS, _VALUES, max_size=4)),
    data=st.builds(
        DataConfig,
        source=_FILLED,
        text_field=_FILLED,
        max_length=st.integers(2, 10**6),
        max_documents=st.none() | _SMALL,
        order=st.sampled_from(["shuffled", "longest-first", "written"]),
    ),
    training=st.builds(
        TrainingConfig,
        epochs=_SMALL,
        max_steps=st.none() | _SMALL,
        learning_rate=st.floats(1e-12, 1e12),
        weight_decay=st.floats(0, 1e12),
        warmup_steps=_SMALL,
        clip_norm=st.none() | st.floats(1e-12, 1e12),
        accumulate=_SMALL,
        precision=st.sampled_from(["fp32", "bf16"]),
        seed=st.integers(0, 2**32 - 1),
        threads=st.none() | _SMALL,
    ),
    memory=st.builds(
        MemoryConfig,
        budget=_BUDGETS,
        probe=st.sampled_from(["auto", "host"]),
        heap_cap=st.booleans(),
        reserve=st.floats(0, 1, exclude_max=True),
    ),
    policy=st.builds(
        PolicyConfig,
        start=st.sampled_from(["planned", "keep", "selective", "recompute"]),
        units=st.lists(_FILLED, max_size=3).map(tuple),
        rules=st.lists(_RULES, max_size=3).map(tuple),
        op_retry=st.sampled_from(["auto", "always", "never"]),
    ),
    control=st.builds(ControlConfig, attempts=_SMALL),
    run=st.builds(
        RunConfig,
        dir=_FILLED,
        name=st.none() | _NAMES,
        checkpoint_every_steps=st.none() | _SMALL,
    ),
)


@settings(max_examples=60)
@given(_RECIPES)
def test_a_recipe_survives_writing_and_loading(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.yaml"
        path.write_text(format_recipe(recipe), encoding="utf-8", newline="")
        assert load_recipe(path) == recipe


@settings(max_examples=30)
@given(_RECIPES)
def test_other_readers_of_yaml_see_the_same_values(recipe: Recipe) -> None:
    assert yaml.safe_load(format_recipe(recipe)) == recipe_as_plain(recipe)


def test_every_value_carries_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("memory:\n  budget: 1GiB\npolicy:\n  rules: [{match: '*.a', action: keep}]\n")
    recipe, origins = load_recipe_with_origins(path, ["data.source=x y"])
    lines = format_recipe(recipe, origins=origins).splitlines()
    shown = {line.split("  # ")[0].rstrip(): line.split("  # ")[1:] for line in lines}
    assert shown["name: mine"] == [str(path)]
    assert shown["  budget: 1GiB"] == [f"{path}:2:11"]
    assert shown["  source: x y"] == ["override 1: data.source=x y"]
    assert shown['    - match: "*.a"'] == [f"{path}:4:19"]
    assert shown["      action:"] == []
    assert shown["        name: keep"] == [f"{path}:4:34"]
    assert shown["  units: []"] == ["default"]
    assert shown["  epochs: 1"] == ["default"]
    assert shown["    - all-linear"] == ["default"]
    with_place = [line for line in lines if "  # " in line]
    assert len(with_place) == len(origins)
    path.write_text(format_recipe(recipe, origins=origins))
    assert load_recipe(path) == recipe


def test_sizes_are_written_in_the_largest_unit_that_is_exact() -> None:
    def shown(num_bytes: int) -> object:
        memory = MemoryConfig(budget=Budget(kind="absolute", value=num_bytes))
        return recipe_as_plain(Recipe(memory=memory))["memory"]["budget"]  # type: ignore[index]

    assert shown(700 * 2**20) == "700MiB"
    assert shown(3 * 2**40) == "3TiB"
    assert shown(2**20 + 1) == "1048577B"

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.recipes import (
    Budget,
    FiguresConfig,
    KeepConfig,
    Origin,
    RecipeError,
    RecomputeConfig,
    RuleConfig,
    list_recipes,
    load_recipe,
    load_recipe_with_origins,
)
from rematic.recipes.recipe_files import find_recipe

_KNOWN = ", ".join(list_recipes())


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _write(name: str, text: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _error(name: str | Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_recipe_may_hold_only_what_differs() -> None:
    _write(
        "mine.yaml",
        "memory: {budget: 90%}\n"
        "policy:\n"
        "  units: ['model.layers.*']\n"
        "  rules:\n"
        "  - {match: 'model.layers.0', action: keep}\n"
        "  - match: 'model.layers.1'\n"
        "    action: {name: recompute}\n",
    )
    recipe = load_recipe("mine.yaml")
    assert recipe.name == "mine"
    assert recipe.model.type is None
    assert recipe.memory.budget == Budget(kind="fraction", value=0.9)
    assert recipe.policy.units == ("model.layers.*",)
    assert recipe.policy.rules == (
        RuleConfig(match="model.layers.0", action=KeepConfig()),
        RuleConfig(match="model.layers.1", action=RecomputeConfig()),
    )


def test_a_recipe_wins_over_those_it_extends() -> None:
    _write("base/a.yaml", "name: a\ndescription: first\ntraining: {epochs: 2, seed: 1}\n")
    _write("base/b.yaml", "extends: a.yaml\nname: b\ntraining: {seed: 2, accumulate: 4}\n")
    _write("c.yaml", "extends: base/b.yaml\ntraining:\n  accumulate: 8\n")
    recipe, origins = load_recipe_with_origins("c.yaml", ["training.warmup_steps=5"])
    training = recipe.training
    assert (training.epochs, training.seed, training.accumulate) == (2, 2, 8)
    assert training.warmup_steps == 5
    assert {key: str(origins[f"training.{key}"]) for key in ("epochs", "seed", "accumulate")} == {
        "epochs": "base/a.yaml:3:20",
        "seed": "base/b.yaml:3:18",
        "accumulate": "c.yaml:3:15",
    }
    assert str(origins["training.warmup_steps"]) == "override 1: training.warmup_steps=5"
    assert str(origins["training.clip_norm"]) == "default"


def test_a_name_and_a_description_are_not_taken_over() -> None:
    _write("a.yaml", "name: a\ndescription: first\n")
    _write("b.yaml", "extends: ./a.yaml\n")
    recipe, origins = load_recipe_with_origins("b.yaml")
    assert (recipe.name, recipe.description) == ("b", "")
    assert origins["name"] == Origin(source="b.yaml")


def test_figures_of_another_recipe_are_not_taken_over() -> None:
    _write(
        "a.yaml",
        "planned_on: {device: cpu, peak: 1GiB, step_seconds: 2.0}\n"
        "measured_on: {device: cpu, peak: 1GiB, tokens_per_second: 3.0}\n",
    )
    _write("b.yaml", "extends: a.yaml\nplanned_on: {peak: 2GiB}\n")
    _write("c.yaml", "extends: b.yaml\n")
    found = load_recipe("c.yaml")
    assert found.planned_on == FiguresConfig(device="cpu")
    assert found.measured_on == FiguresConfig()
    assert load_recipe("b.yaml").planned_on == FiguresConfig(device="cpu", peak="2GiB")


def test_a_file_may_extend_a_shipped_recipe() -> None:
    _write("mine.yaml", "extends: tiny-cpu\nmemory: {budget: 1GiB}\n")
    recipe = load_recipe("mine.yaml")
    assert recipe.memory.budget.value == 2**30
    assert recipe.memory.heap_cap
    assert recipe.model.config["hidden_size"] == 384


def test_the_last_override_wins() -> None:
    recipe, origins = load_recipe_with_origins(
        "tiny-cpu", ["training.epochs=2", "training.epochs=3"]
    )
    assert recipe.training.epochs == 3
    assert str(origins["training.epochs"]) == "override 2: training.epochs=3"


def test_overrides_reach_into_lists_and_free_mappings() -> None:
    recipe = load_recipe(
        "tiny-cpu",
        [
            "policy.rules[0].match=*.layers.0",
            "policy.rules[0].action=keep",
            "model.config.num_hidden_layers=2",
            "model.config.rope_parameters={rope_theta: 1e4}",
            "run.name=",
            "memory.budget=1.5GiB",
        ],
    )
    assert recipe.policy.rules == (RuleConfig(match="*.layers.0", action=KeepConfig()),)
    assert recipe.model.config["num_hidden_layers"] == 2
    assert recipe.model.config["rope_parameters"] == {"rope_theta": 10000.0}
    assert recipe.run.name is None
    assert recipe.memory.budget.value == 3 * 2**29


def test_a_problem_names_the_file_in_which_it_stands() -> None:
    _write("a.yaml", "training:\n  epoch: 2\n")
    _write("b.yaml", "extends: ./a.yaml\nmemory:\n  heap_cap: no\n")
    assert _error("b.yaml", "control.attempts=x").splitlines() == [
        "a.yaml:2:3: training.epoch is an unknown key, did you mean epochs?; the keys of training"
        " are epochs, max_steps, optimizer, learning_rate, weight_decay, schedule, final_share,"
        " warmup_steps, clip_norm, accumulate, precision, seed, threads",
        "b.yaml:3:13: memory.heap_cap is 'no' (text); expected a truth value; write true or false",
        "override 1: control.attempts=x: control.attempts is 'x' (text); expected a whole number;"
        " write its digits alone, such as 1024",
    ]


def test_a_budget_that_cannot_be_read_has_its_place() -> None:
    _write("a.yaml", "memory: {budget: 1}\n")
    assert _error("a.yaml").startswith("a.yaml:1:18: memory.budget: budget 1 could mean one byte")


def test_a_rule_without_its_action_has_its_place() -> None:
    _write("a.yaml", "policy:\n  rules:\n  - match: x\n  - {match: y, action: selectiv}\n")
    assert _error("a.yaml").splitlines() == [
        "a.yaml:3:5: policy.rules[0].action is missing; write it",
        "a.yaml:4:24: policy.rules[1].action.name is 'selectiv' (text); expected one of keep,"
        " selective, recompute, recompute+offload, offload, compress, tile, did you mean"
        " selective?",
    ]


@pytest.mark.parametrize("chain", [["a"], ["a", "b"], ["a", "b", "c"]], ids="-".join)
def test_a_recipe_that_extends_itself(chain: list[str]) -> None:
    for name, parent in zip(chain, [*chain[1:], chain[0]], strict=True):
        _write(f"{name}.yaml", f"extends: ./{parent}.yaml\n")
    names = " -> ".join(f"{name}.yaml" for name in [*chain, chain[0]])
    assert _error("a.yaml") == (
        f"{chain[-1]}.yaml:1:10: extends: the recipe extends itself ({names}); remove one extends"
        " of this chain"
    )


def test_a_cycle_below_the_first_recipe_is_shown_whole() -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "b")):
        _write(f"{name}.yaml", f"extends: {parent}.yaml\n")
    os.symlink("b.yaml", "link.yaml")
    _write("c.yaml", "extends: link.yaml\n")
    assert "(a.yaml -> b.yaml -> c.yaml -> link.yaml)" in _error("a.yaml")


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        (
            "tiny-cpo",
            "a.yaml:1:10: extends: 'tiny-cpo' is not the name of a recipe, did you mean tiny-cpu?;"
            f" known recipes are {_KNOWN}; a file of your own needs its path, such as ./mine.yaml",
        ),
        (
            "a",
            f"a.yaml:1:10: extends: 'a' is not the name of a recipe; known recipes are {_KNOWN};"
            " a file of your own needs its path, such as ./mine.yaml; to use the file of that name"
            " write ./a.yaml",
        ),
        (
            "basis.yaml",
            "a.yaml:1:10: extends: 'basis.yaml' is no recipe: the file does not exist, did you mean"
            f" base.yaml?; write the path of a file, or the name of a known recipe: {_KNOWN}",
        ),
        (
            "./nowhere/b.yaml",
            "a.yaml:1:10: extends: './nowhere/b.yaml' is no recipe: the file does not exist; write"
            f" the path of a file, or the name of a known recipe: {_KNOWN}",
        ),
        (
            "[base.yaml]",
            "a.yaml:1:10: extends: no recipe is named; expected the name of one recipe, or its path"
            " relative to this file",
        ),
        (
            "",
            "a.yaml:1:9: extends: no recipe is named; expected the name of one recipe, or its path",
        ),
    ],
    ids=["near a name", "a file's stem", "near a file", "no folder", "list", "nothing"],
)
def test_a_parent_that_is_not_there(extends: str, message: str) -> None:
    _write("base.yaml", "{}")
    _write("a.yaml", f"extends: {extends}\n")
    assert _error("a.yaml").startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.yaml: the file is empty; expected the keys of a recipe"),
        (b"# only a comment\n", "a.yaml: the file is empty; expected the keys of a recipe"),
        (
            b"- a\n- b\n",
            "a.yaml:1:1: no keys; expected those of a recipe at the top of the file, such as"
            " training: {epochs: 1}",
        ),
        (b"tiny-cpu\n", "a.yaml:1:1: no keys; expected those of a recipe at the top of the file"),
        (
            b"name: \xff\n",
            "a.yaml: not UTF-8 text (byte 6); expected a recipe, a YAML file saved as UTF-8",
        ),
        (b"name: a\0\n", "a.yaml: a binary file; expected a recipe, a YAML file"),
        (
            b"# " + b"x" * 256 * 1024,
            "a.yaml: larger than 262144 bytes; expected a recipe, a short YAML file",
        ),
        (
            b"a: " + b"[" * 100_000,
            "a.yaml:1:23: nested more than 20 levels deep; no recipe needs that",
        ),
        (b"name: ${oc.env:HOME}\n", "a.yaml:1:7: '${oc.env:HOME}' holds ${, but recipes have no"),
        (
            b"name: a\nname: b\n",
            "a.yaml:2:1: the key 'name' is written twice (first at a.yaml:1:1)",
        ),
    ],
    ids=[
        "empty",
        "comment",
        "list",
        "text",
        "latin",
        "zero byte",
        "large",
        "deep",
        "dollar",
        "twice",
    ],
)
def test_a_file_that_is_no_recipe(content: bytes, message: str) -> None:
    _write("a.yaml", content)
    assert _error("a.yaml").startswith(message)


def test_a_file_whose_name_is_no_name_for_a_folder() -> None:
    _write("my@recipe.yaml", "{}")
    assert _error("my@recipe.yaml").startswith("my@recipe.yaml: name is 'my@recipe'; expected 1 to")
    assert load_recipe("my@recipe.yaml", ["name=mine"]).name == "mine"


def test_overrides_as_one_text_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"^overrides is the text 'a=1'; expected a list of"):
        load_recipe("tiny-cpu", "a=1")


_PIECES = st.sampled_from(
    [b"{", b"]", b": ", b"- ", b"\n", b"  ", b"&a ", b"*a", b"!!int ", b"? ", b"|", b'"', b"'"]
) | st.sampled_from(
    [b"#", b"${", b"<<", b"\t", b"\xff", b"\0", b"---\n", b"%YAML 1.1\n", b"null: x\n", b"1e999"]
)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5), _PIECES), min_size=1, max_size=4))
def test_a_damaged_file_loads_or_is_refused(damages: list[tuple[float, int, bytes]]) -> None:
    content = find_recipe("tiny-cpu").read_bytes()
    for place, length, piece in damages:
        start = int(place * len(content))
        content = content[:start] + piece + content[start + length :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.yaml"
        path.write_bytes(content)
        # Any other error is a failure of this test.
        with contextlib.suppress(RecipeError):
            load_recipe(path)

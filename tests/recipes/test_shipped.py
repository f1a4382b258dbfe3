from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rematic
from rematic import recipes
from rematic.recipes import (
    Recipe,
    format_recipe,
    list_recipes,
    load_recipe,
    load_recipe_with_origins,
)

_FOLDER = Path(recipes.__file__).parent


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_loads_and_is_what_it_says(name: str) -> None:
    recipe, origins = load_recipe_with_origins(name)
    assert recipe.name == name
    assert recipe.description
    assert recipe.model.type
    assert origins["model.type"].line is not None
    assert "# default" in format_recipe(recipe, origins=origins)


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_says_how_to_run_it(name: str) -> None:
    lines = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    header = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    assert header[0].startswith("# Purpose: ")
    assert f"# Run:      rematic train {name}" in header
    (override,) = [line for line in header if line.startswith("# Override: ")]
    program, command, shown, *overrides = override.removeprefix("# Override: ").split()
    assert (program, command, shown) == ("rematic", "train", name)
    assert load_recipe(name, overrides) != load_recipe(name)
    assert any(line.startswith("# Does not work: ") for line in header)


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_says_what_it_was_planned_and_measured_on(name: str) -> None:
    recipe = load_recipe(name)
    planned, measured = recipe.planned_on, recipe.measured_on
    header = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n\n")[0]
    (line,) = [line for line in header.splitlines() if line.startswith("# Planned:  for ")]
    count = {1: "one", 2: "two", 4: "four", 8: "eight"}[recipe.distributed.devices]
    device = "the CPU" if planned.device == "cpu" else f"{count} {planned.device}"
    assert line.startswith(f"# Planned:  for {device}")
    assert planned.peak_bytes
    assert (planned.step_seconds is None) is (planned.device == "cpu")
    (where,) = [line for line in header.splitlines() if line.startswith("# Measured: ")]
    if measured.device is None:
        assert where.startswith("# Measured: nothing yet")
    else:
        assert re.fullmatch(r"# Measured: \d{4}-\d\d-\d\d, .+; see measured_on\.", where)
        assert measured.peak_bytes
        assert measured.tokens_per_second


def test_the_static_baseline_differs_by_its_policy_alone() -> None:
    planned, full = load_recipe("tiny-cpu"), load_recipe("tiny-cpu-full")
    assert (planned.policy.start, full.policy.start) == ("planned", "recompute")
    policy = dataclasses.replace(planned.policy, start="recompute")
    control = dataclasses.replace(planned.control, adapt=False)
    named = dataclasses.replace(
        planned,
        name=full.name,
        description=full.description,
        planned_on=full.planned_on,
        measured_on=full.measured_on,
    )
    same = dataclasses.replace(named, policy=policy, control=control)
    assert full == same


def test_tiny_cpu_is_the_model_that_the_demo_trains() -> None:
    recipe = load_recipe("tiny-cpu")
    assert recipe.memory.budget.value == 512 * 2**20
    assert recipe.memory.heap_cap
    assert (recipe.data.source, recipe.data.max_length) == ("pydoc_topics", 1024)
    assert recipe.model.type == "llama"
    vocab, width, inner, depth = (
        _size(recipe, key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    # Attention, gated feed-forward and two norms a block; embedding, head and the last norm.
    block = 4 * width**2 + 3 * width * inner + 2 * width
    assert depth * block + 2 * vocab * width + width == 21_489_024


def _size(recipe: Recipe, key: str) -> int:
    size = recipe.model.config[key]
    assert isinstance(size, int)
    return size


_IMPORT_ALONE = """
import sys, types
parent = types.ModuleType("rematic")
parent.__path__ = [sys.argv[1]]
sys.modules["rematic"] = parent
{extra}
import rematic.recipes
rematic.recipes.load_recipe("tiny-cpu-full", ["training.epochs=2"])
heavy = {{"torch", "omegaconf", "numpy", "lightning", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_room_itself_imports_nothing_heavy() -> None:
    parent = Path(rematic.__file__).parent
    # In an editable install the room lies beside the package, not inside it.
    extra = (
        "" if (parent / "recipes").is_dir() else f"parent.__path__.append({str(_FOLDER.parent)!r})"
    )
    code = _IMPORT_ALONE.format(extra=extra)
    command = [sys.executable, "-W", "error", "-c", code, str(parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""Every shipped recipe is planned, without weights, device or network, and the README says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from rematic.cli.recipe_figures import planned_figures
from rematic.cli.recipe_forecast import Profiles, forecast_recipe
from rematic.cli.recipe_table import markdown_row
from rematic.recipes import list_recipes, load_recipe

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
TABLE = README.partition("<!-- recipes: begin -->\n")[2].partition("<!-- recipes: end -->")[0]
PROFILES = Profiles()  # recipes that differ by their lengths alone are traced once
LONG_TRACES = ("gemma-3-4b-lora-32k", "mixtral-8x7b-qlora-16k")  # windows, experts
PLANNED = [
    pytest.param(name, marks=pytest.mark.slow) if name in LONG_TRACES else name
    for name in list_recipes()
]
CPU_RECIPES = [name for name in list_recipes() if name.startswith("tiny-cpu")]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan asked for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_fits_its_device_with_its_headroom(name: str) -> None:
    recipe = load_recipe(name)
    found = forecast_recipe(recipe, profiles=PROFILES)
    peak_bytes = found.own.peak.total
    assert found.own.fits
    assert peak_bytes <= found.budget_bytes * (1 - recipe.goals.headroom_min)
    if found.device.memory_bytes is not None:
        assert peak_bytes <= 0.95 * found.device.memory_bytes
    assert planned_figures(found) == recipe.planned_on
    (row,) = [line for line in TABLE.splitlines() if f"[`{name}`]" in line]
    assert row == markdown_row(found)


def test_the_table_has_every_recipe_and_keeps_what_ran_out_of_memory() -> None:
    rows = TABLE.splitlines()[2:]
    assert sorted(row.split("`")[1] for row in rows) == sorted(list_recipes())
    assert sum("out of memory" in row for row in rows) > len(rows) / 2


@pytest.mark.parametrize("name", CPU_RECIPES)
def test_a_recipe_for_the_cpu_states_its_cap(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.planned_on.device == "cpu"
    assert recipe.memory.budget.kind == "absolute"
    assert recipe.memory.heap_cap is (recipe.distributed.devices == 1)

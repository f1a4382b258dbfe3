"""What variables of the environment make of a plugin."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import rematic
from rematic.hosts.recompute_environment import read_environment

KEY = "FSDP_ACTIVATION_CHECKPOINTING"


@pytest.mark.parametrize(
    ("environment", "recipe", "enabled"),
    [
        ({}, "auto", False),
        ({"REMATIC_RECIPE": "tiny-cpu"}, "tiny-cpu", True),
        ({"REMATIC_RECIPE": ""}, "auto", False),
        ({KEY: "true"}, "auto", True),
        ({KEY: "false"}, "auto", False),
        ({KEY: "false", "REMATIC_RECIPE": "tiny-cpu"}, "tiny-cpu", True),
        ({KEY: "true", "REMATIC_ENABLED": "false"}, "auto", False),
        ({"REMATIC_ENABLED": "false", "REMATIC_RECIPE": "tiny-cpu"}, "tiny-cpu", False),
        ({"REMATIC_ENABLED": "True"}, "auto", True),
    ],
    ids=str,
)
def test_what_turns_it_on(environment: dict[str, str], recipe: str, enabled: bool) -> None:
    assert read_environment(environment) == {
        "recipe": recipe,
        "overrides": (),
        "enabled": enabled,
    }


def test_overrides_are_a_list() -> None:
    fields = read_environment({"REMATIC_OVERRIDES": '["memory.budget=1GiB", "control.attempts=2"]'})
    assert fields["overrides"] == ("memory.budget=1GiB", "control.attempts=2")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"REMATIC_ENABLED": "maybe"}, r"REMATIC_ENABLED is 'maybe': expected true or false"),
        ({KEY: "on and off"}, rf"{KEY} is 'on and off': expected true or false"),
        ({"REMATIC_OVERRIDES": "a=1"}, r"REMATIC_OVERRIDES is 'a=1': expected a JSON list"),
        ({"REMATIC_OVERRIDES": "[1]"}, r"REMATIC_OVERRIDES is '\[1\]': expected a JSON list"),
    ],
    ids=["enabled", "accelerate's key", "overrides", "list of numbers"],
)
def test_what_cannot_be_read_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment(environment)


def test_accelerates_own_key_is_honoured_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    read_environment({KEY: "true"})
    assert "fsdp_config.fsdp_activation_checkpointing) turns rematic on" in caplog.text


def test_nothing_set_is_off_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rematic"):
        read_environment({})
    assert "rematic is off: neither REMATIC_RECIPE nor" in caplog.text


def test_only_from_config_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATIC_RECIPE", "tiny-cpu")
    monkeypatch.setenv("REMATIC_OVERRIDES", '["control.attempts=2"]')
    assert rematic.RecomputePlugin().recipe == "auto"
    plugin = rematic.RecomputePlugin.from_config()
    assert (plugin.recipe, plugin.overrides) == ("tiny-cpu", ("control.attempts=2",))
    own: Any = {"control": {"attempts": 3}}
    assert rematic.RecomputePlugin.from_config(recipe=own, overrides=()).recipe is own


@pytest.mark.parametrize("launched", [True, False])
def test_a_key_that_the_launcher_drops_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    launched: bool,
) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text("fsdp_config: {rematic_recipe: tiny-cpu}\n")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    fields = read_environment({"ACCELERATE_MIXED_PRECISION": "no"} if launched else {})
    assert not fields["enabled"]
    line = "names a recipe by fsdp_config.rematic_recipe, which `accelerate launch` does not pass"
    assert (line in caplog.text) is launched

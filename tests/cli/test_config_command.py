"""The toggle is edited in place; nothing else of a config changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rematic.cli import main
from rematic.cli.config_edit import edit_section
from tests.cli.test_accelerate_file import CONFIGS

COMMENTED = """\
# our cluster
compute_environment: LOCAL_MACHINE   # one node
recompute_config:
    # asked for by the long documents
    enabled: false  # for now
    recipe: tiny-cpu
num_processes: 2
mixed_precision: 'no'
"""


def run(path: Path, *options: str) -> int:
    return main(["config", "--config_file", str(path), *options])


def test_only_the_value_changes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(COMMENTED)
    assert run(path, "--enable") == 0
    assert path.read_text() == COMMENTED.replace("enabled: false", "enabled: true")
    assert run(path, "--recipe", "tiny-cpu-full") == 0
    changed = COMMENTED.replace("enabled: false", "enabled: true")
    assert path.read_text() == changed.replace("recipe: tiny-cpu", "recipe: tiny-cpu-full")
    assert run(path, "--disable", "--recipe", "tiny-cpu") == 0
    assert path.read_text() == COMMENTED


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_that_accelerate_writes_round_trips(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    before = path.read_text()
    copy.write_text(before)
    assert run(copy, "--enable", "--recipe", "tiny-cpu") == 0
    enabled = copy.read_text()
    read = json.loads(enabled) if before.startswith("{") else yaml.safe_load(enabled)
    assert read.pop("recompute_config") == {"enabled": True, "recipe": "tiny-cpu"}
    assert read == yaml.safe_load(before)
    assert run(copy, "--disable") == 0
    assert copy.read_text() == enabled.replace('enabled": true', 'enabled": false').replace(
        "enabled: true", "enabled: false"
    )
    assert run(copy, "--enable") == 0
    assert copy.read_text() == enabled


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "recompute_config:\n  enabled: true\n"),
        ("a: 1", "a: 1\nrecompute_config:\n  enabled: true\n"),
        ("recompute_config:\nb: 1\n", "recompute_config:\n  enabled: true\nb: 1\n"),
        ("recompute_config: # x\n", "recompute_config: # x\n  enabled: true\n"),
        ("recompute_config: {}\n", "recompute_config: {enabled: true}\n"),
        (
            "recompute_config: {recipe: a} # x\n",
            "recompute_config: {enabled: true, recipe: a} # x\n",
        ),
        (
            "recompute_config:\n    recipe: a\nb: 1\n",
            "recompute_config:\n    enabled: true\n    recipe: a\nb: 1\n",
        ),
        ("{}", '{\n  "recompute_config": {"enabled": true}}'),
        ("recompute_config: null # x\n", "recompute_config: {enabled: true} # x\n"),
        ("a: 1\r\nb: 2\r\n", "a: 1\r\nb: 2\r\nrecompute_config:\r\n  enabled: true\r\n"),
    ],
    ids=[
        *("empty", "no newline", "no value", "comment", "flow", "flow key", "new key", "json"),
        *("null", "lines of Windows"),
    ],
)
def test_shapes_of_the_section(text: str, expected: str) -> None:
    assert edit_section(text, {"enabled": True}) == expected


@pytest.mark.parametrize("recipe", ["no", "010", "a: b", "my recipe.yaml", "./long.yaml", "1.5"])
def test_recipes_that_look_like_something_else(recipe: str) -> None:
    text = edit_section("a: 1\n", {"recipe": recipe})
    assert yaml.safe_load(text)["recompute_config"]["recipe"] == recipe


def test_a_value_of_several_lines_is_replaced() -> None:
    text = "recompute_config:\n  recipe: >-\n    long\n    name\n  enabled: true\n"
    edited = edit_section(text, {"recipe": "tiny-cpu"})
    assert edited == "recompute_config:\n  recipe: tiny-cpu\n  enabled: true\n"


@pytest.mark.parametrize(
    "text",
    [
        "recompute_config: [1]\n",
        "other: &a {enabled: true}\nrecompute_config: *a\n",
        "recompute_config: {enabled: true, enabled: true}\n",
        "a: 1\n---\nb: 1\n",
        "a: 1\n...\n",
    ],
    ids=["list", "shared with another key", "twice", "two documents", "end of document"],
)
def test_what_cannot_be_edited_is_refused_and_left_as_it_is(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recompute_config could not be edited in this text"):
        edit_section(text, {"enabled": False})
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert run(path, "--disable") == 2
    assert path.read_text() == text


def test_the_ends_of_lines_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(COMMENTED.replace("\n", "\r\n").encode())
    assert run(path, "--enable") == 0
    expected = COMMENTED.replace("enabled: false", "enabled: true").replace("\n", "\r\n")
    assert path.read_bytes() == expected.encode()


def test_shows_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: 1\n")
    assert run(path) == 0
    assert capsys.readouterr().out == f"{path} says nothing about recomputation\n"
    assert run(path, "--recipe", "tiny-cpu") == 0
    assert capsys.readouterr().out == f"{path}: on, recipe tiny-cpu\n"
    assert run(path, "--json") == 0
    expected = {"enabled": True, "recipe": "tiny-cpu", "overrides": []}
    assert json.loads(capsys.readouterr().out) == expected


def test_the_default_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text("num_processes: 1\n")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert run(path, "--enable") == 2
    message = capsys.readouterr().err
    assert "is Accelerate's default file: `accelerate launch`, `env` and `config update`" in message
    assert path.read_text() == "num_processes: 1\n"


def test_a_second_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fsdp_config:\n  rematic_recipe: tiny-cpu\n")
    assert run(path, "--disable") == 2
    assert "has fsdp_config.rematic_recipe already; expected one place" in capsys.readouterr().err


def test_an_unknown_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: 1\n")
    assert run(path, "--recipe", "tiny-cpuu") == 2
    assert "tiny-cpuu" in capsys.readouterr().err
    assert path.read_text() == "num_processes: 1\n"

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from rematic import recipes
from rematic.byte_sizes import format_bytes
from rematic.cli import main
from rematic.cli.accelerate_file import SECTION, load_accelerate_file, section_of
from rematic.recipes import list_recipes, load_recipe

ACCELERATE = Path(recipes.__file__).parent / "accelerate"


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["recipes", *argv]) == 0
    return capsys.readouterr().out


def test_lists_every_recipe_with_length_device_peak_and_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys).splitlines()
    assert lines[0].split()[:6] == ["recipe", "tokens", "device", "peak", "seconds", "tokens/s"]
    names = [line.split()[0] for line in lines[2 : 2 + len(list_recipes())]]
    assert sorted(names) == list(list_recipes())
    assert names[0] == "tiny-cpu"
    assert names[-1] == "llama-3.1-8b-full-32k-fsdp2"
    (row,) = [line for line in lines if line.startswith("llama-3.1-8b-full-32k-fsdp2 ")]
    assert "32,768" in row
    assert "8 x h100" in row
    peak_bytes = load_recipe("llama-3.1-8b-full-32k-fsdp2").planned_on.peak_bytes
    assert peak_bytes is not None
    assert format_bytes(peak_bytes) in row


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["name"]: one for one in json.loads(printed(capsys, "--json"))}
    assert sorted(found) == list(list_recipes())
    one = found["llama-3.3-70b-qlora-16k-fsdp2"]
    assert (one["max_length"], one["strategy"], one["devices"]) == (16384, "fsdp2", 4)
    assert (one["model"], one["method"]) == ("meta-llama/Llama-3.3-70B-Instruct", "qlora")
    planned = one["planned_on"]
    assert planned["device"] == "a100-80g"
    assert 40 * 2**30 < planned["peak_bytes"] < 80 * 2**30
    assert planned["tokens_per_second"] == 4 * 16384 / planned["step_seconds"]
    assert one["measured_on"]["peak_bytes"] is None


def test_shows_where_each_value_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", "llama-3.1-8b-qlora-32k", "tuning.r=8")
    places = {line.split(":")[0].strip(): line.partition("# ")[2] for line in text.splitlines()}
    assert places["r"] == "override 1: tuning.r=8"
    assert "llama-3.1-8b-qlora-32k.yaml:" in places["max_length"]
    assert "llama-3.1-8b-qlora-16k.yaml:" in places["vocab_size"]
    base = (
        (Path(recipes.__file__).parent / "llama-3.1-8b-qlora-16k.yaml")
        .read_text("utf-8")
        .splitlines()
    )
    (line,) = [i for i, text in enumerate(base, start=1) if text.startswith("  epochs: ")]
    assert places["epochs"].endswith(f"16k.yaml:{line}:{len('  epochs: ') + 1}")
    assert places["rslora"] == "default"
    assert yaml.safe_load(text)["tuning"]["r"] == 8


def test_shows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "show", "tiny-cpu-full", "--json"))
    assert found["recipe"]["policy"]["start"] == "recompute"
    assert found["origins"]["policy.start"].endswith("tiny-cpu-full.yaml:13:10")
    assert found["origins"]["model.type"].endswith("tiny-cpu.yaml:15:9")


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_accelerate_configs_are_what_both_launchers_read(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = printed(capsys, "show", f"accelerate/{name}")
    assert text == (ACCELERATE / f"{name}.yaml").read_text("utf-8")
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    config = load_accelerate_file(path)
    section = section_of(config, path=path)
    assert section is not None
    assert section.enabled
    load_recipe(section.recipe, section.overrides)
    path.write_text(yaml.safe_dump({k: v for k, v in config.items() if k != SECTION}))
    read = load_config_from_file(str(path))  # as the stock launcher does, which refuses others
    assert (
        read.distributed_type.value == {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
    )
    assert read.num_processes == {"single": 1, "ddp": 2, "fsdp2": 8}[name]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "tiny-cpo"], "'tiny-cpo' is not the name of a recipe, did you mean tiny-cpu"),
        (["show", "accelerate/fsdp"], "'accelerate/fsdp' is no recipe"),
        (["show", "accelerate/fsdp2", "--json"], "--json was given; expected its name alone"),
        (["show", "accelerate/fsdp2", "a=1"], "a=1 was given; expected its name alone"),
        (["show", "tiny-cpu", "data.max_lenght=2"], "did you mean max_length"),
        (["list"], "invalid choice: 'list'"),
    ],
    ids=["name", "accelerate", "json", "override", "key", "command"],
)
def test_says_what_cannot_be_shown(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *argv]) == 2
    assert message in capsys.readouterr().err

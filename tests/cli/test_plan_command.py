from __future__ import annotations

import gc
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rematic.cli import main
from rematic.cli.plan_command import budget_of, parse_lengths
from rematic.cost import calibrate
from rematic.cost.devices import gpu_named
from rematic.recipes import parse_budget

SMALL = (
    "model.config.num_hidden_layers=4",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=160",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.max_position_embeddings=512",
    "data.max_length=256",
    "memory.budget=7MiB",
)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is the same on every machine."""
    rates = {"float32": 5e10, "bfloat16": 1e11, "bytes": 1e10, "replay": 1e-3, "selective": 3e-3}
    monkeypatch.setattr(calibrate, "_read", lambda: rates)


def test_prints_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "cpu", "--lengths", "128,256", "--max-length"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["budget_bytes"], report["usable_bytes"]) == (7 * 2**20, int(7 * 2**20 * 0.95))
    assert [one["length"] for one in report["lengths"]] == [128, 256]
    longest_first = report["lengths"][1]
    rows = {row["policy"]: row for row in longest_first["policies"]}
    peaks = {name: row["peak"]["bytes"] for name, row in rows.items()}
    assert peaks["recompute all"] < peaks["op list"] < peaks["keep all"]
    assert peaks["recompute all"] < peaks["every second block"] < peaks["keep all"]
    assert not rows["keep all"]["fits"]
    assert rows["planned"]["fits"]
    assert 0 < rows["planned"]["slow_down"] < rows["recompute all"]["slow_down"]
    fitting = [row["seconds"] for row in rows.values() if row["fits"]]
    assert rows["planned"]["seconds"] <= 1.001 * min(fitting)
    for row in rows.values():
        peak = row["peak"]
        parts = ("fixed_bytes", "kept_bytes", "gradients_bytes", "working_bytes")
        assert sum(peak[part] for part in parts) == peak["bytes"]
    longest = report["longest"]
    assert longest["keep all"] < longest["every second block"] <= longest["planned"] <= 512
    assert longest["recompute all"] <= longest["planned"]


def test_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "step.svg"
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "l4", "--batch", "2", "--budget", "4GiB"]
    rule = "policy.rules=[{match: LlamaDecoderLayer, last: 1, action: recompute}]"
    assert main([*argv, rule, "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("recipe tiny-cpu on l4: budget 4.0 GiB, of which plans use 3.8 GiB\n")
    assert "2 x 64 tokens: weights" in text
    assert "planned: 3 x keep, 1 x recompute" in text
    assert "note: only the row `planned` follows the rules of the recipe" in text
    root = ElementTree.fromstring(plot.read_text("utf-8"))
    names = [element.tag.rsplit("}")[-1] for element in root]
    assert names.count("polyline") == 6
    assert any("sqrt(N) segments" in (element.text or "") for element in root)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "a101"], "unknown device 'a101': expected cpu or one of t4"),
        (["--lengths", "4k,many"], "the length 'many' cannot be read; expected tokens"),
        (["--device", "cpu", "--budget", "0.9"], "the memory of a CPU is also for others"),
        (["--lengths", "2k", "--device", "l4"], "the model has positions for 512 tokens"),
        (["--budget", "20G"], "write '20GiB'"),
        (["--batch", "0"], "--batch is 0; expected a number of sequences from 1 on"),
    ],
    ids=["device", "length", "share of a CPU", "positions", "budget", "batch"],
)
def test_says_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["plan", "tiny-cpu", *SMALL, *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_budget_beyond_the_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "t4", "--lengths", "64", "--json"]
    assert main([*argv, "--budget", "15GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
    assert main([*argv, "--budget", "16GiB"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("the budget is more than the 15.0 GiB of t4")


@pytest.mark.parametrize("start", ["offload", "compress", "recompute+offload"])
def test_what_a_recipe_starts_with_is_planned_although_it_has_no_row(
    capsys: pytest.CaptureFixture[str], start: str
) -> None:
    overrides = [f"policy.start={start}", "policy.allow_lossy=true"]
    assert main(["plan", "tiny-cpu", *overrides, "--lengths", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (step,) = found["lengths"]
    rows = {row["policy"]: row for row in step["policies"]}
    assert rows["planned"]["plan"] == {start: 12}
    assert rows["planned"]["peak"]["bytes"] < rows["keep all"]["peak"]["bytes"]
    assert f"the row `planned` is {start}, with which the recipe starts" in " ".join(found["notes"])


def test_the_collector_of_cycles_is_off_while_it_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def plan(*_: object, **__: object) -> None:
        seen.append(gc.isenabled())
        raise ValueError("nothing is planned here")

    monkeypatch.setattr("rematic.cli.plan_command._plan", plan)
    assert main(["plan", "tiny-cpu"]) != 0
    assert "nothing is planned here" in capsys.readouterr().err
    assert seen == [False]
    assert gc.isenabled()


def test_a_plot_needs_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "l4", "--lengths", "64"]
    assert main([*argv, "--plot", str(tmp_path / "none" / "step.svg")]) == 2
    assert "cannot be written: there is no folder" in capsys.readouterr().err


def test_reads_lengths() -> None:
    assert parse_lengths("4k, 8K,100,100", longest=7) == [100, 4096, 8192]
    assert parse_lengths(None, longest=1024) == [256, 512, 1024]
    assert parse_lengths(None, longest=3) == [2, 3]
    with pytest.raises(ValueError, match="the length '1' cannot be read"):
        parse_lengths("1", longest=7)
    with pytest.raises(ValueError, match="the length '²' cannot be read"):
        parse_lengths("²", longest=7)
    with pytest.raises(ValueError, match="the length '' cannot be read"):
        parse_lengths("4k,", longest=7)


def test_a_budget_is_bytes_of_the_device() -> None:
    gpu = gpu_named("a100-80g")
    assert budget_of(parse_budget("20GiB"), gpu) == 20 * 2**30
    assert budget_of(parse_budget("50%"), gpu) == 40 * 2**30
    assert budget_of(parse_budget("auto"), gpu) == int(0.95 * 80 * 2**30)

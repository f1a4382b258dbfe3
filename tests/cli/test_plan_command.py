from __future__ import annotations

import gc
import json
from collections.abc import Iterator
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
        needed = ("working_bytes", "head_bytes")
        parts = ("fixed_bytes", "kept_bytes", "gradients_bytes", *needed)
        assert sum(peak[part] for part in parts) == peak["bytes"]
        assert peak[needed[peak["place"] != "head"]] == 0
    longest = report["longest"]
    assert longest["keep all"] < longest["every second block"] <= longest["planned"] <= 512
    assert longest["recompute all"] <= longest["planned"]


def _fields(value: object) -> Iterator[str]:
    """Names of an object's fields and of those inside it; plans are by action, rows by policy."""
    if isinstance(value, list):
        for one in value:
            yield from _fields(one)
    elif isinstance(value, dict):
        yield from value
        for name, one in value.items():
            if name not in ("plan", "longest"):
                yield from _fields(one)


def test_every_field_is_documented_and_finite(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "l4", "--lengths", "64", "--max-length"]
    assert main([*argv, "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    told = page.partition("## The figures as JSON")[2].partition("\n## ")[0]
    assert {name for name in _fields(report) if f"`{name}`" not in told} == set()


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
        (
            ["--lengths", "2k", "--device", "l4"],
            "--lengths asks for 2048 tokens, but the model has positions for 512; expected at most",
        ),
        (["--lengths", "9" * 30], f"the length '{'9' * 30}' cannot be read; expected tokens, 2 to"),
        (["--budget", "20G"], "write '20GiB'"),
        (["--batch", "0"], "--batch is 0; expected a number of sequences from 1 to 2147483647"),
        (["--batch", "3000000000"], "--batch is 3000000000; expected a number of sequences"),
        (["--plot", "."], "the plot . cannot be written: it is a folder; expected a file"),
        (["--plot", "a.png"], "the plot a.png would be an SVG drawing; expected a name ending in"),
    ],
    ids=[
        *("device", "length", "share of a CPU", "positions", "too long", "budget", "batch"),
        *("too many", "folder", "drawn as svg"),
    ],
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


def test_a_plot_needs_a_folder_that_can_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "l4", "--lengths", "64"]
    assert main([*argv, "--plot", str(tmp_path / "none" / "step.svg")]) == 2
    assert "cannot be written: there is no folder" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main([*argv, "--plot", str(tmp_path / "step.svg")]) == 2
    assert "cannot be written: nobody here may write there" in capsys.readouterr().err


def test_figures_are_printed_although_the_plot_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "l4", "--lengths", "64", "--json"]
    assert main([*argv, "--plot", str(tmp_path / "step.svg")]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lengths"][0]["length"] == 64
    assert "cannot be written: [Errno 28] No space left on device" in captured.err


def test_where_nothing_fits_the_smallest_budget_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "cpu", "--lengths", "256"]

    def planned(budget: int) -> tuple[bool, int]:
        assert main([*argv, "--budget", str(budget), "--json"]) == 0
        (step,) = json.loads(capsys.readouterr().out)["lengths"]
        return step["policies"][-1]["fits"], step["smallest_budget_bytes"]

    fits, smallest = planned(1024)
    assert not fits
    assert planned(smallest) == (True, smallest)
    assert planned(smallest - 1) == (False, smallest)
    assert main([*argv, "--budget", "1KiB"]) == 0
    said = f"no plan fits: the smallest budget that is enough is {-(-smallest // 2**20)}MiB\n"
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize("budget", ["6MiB", "7MiB"])
def test_a_step_of_the_longest_sequence_fits_and_a_longer_one_does_not(
    capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    argv = ["plan", "tiny-cpu", *SMALL, "--device", "cpu", "--budget", budget, "--json"]
    assert main([*argv, "--lengths", "64", "--max-length"]) == 0
    longest = json.loads(capsys.readouterr().out)["longest"]
    edges = sorted({length + more for length in longest.values() for more in (0, 1)} - {0, 1, 513})
    assert main([*argv, "--lengths", ",".join(map(str, edges))]) == 0
    fits = {
        (step["length"], row["policy"]): row["fits"]
        for step in json.loads(capsys.readouterr().out)["lengths"]
        for row in step["policies"]
    }
    for policy, length in longest.items():
        assert length < 2 or fits[length, policy]
        assert length > 511 or length < 1 or not fits[length + 1, policy]
    assert 1 < longest["keep all"] < longest["planned"] <= 512


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

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rematic.cli import main
from rematic.journal import read_journal, summarize
from rematic.memory import glibc

TINY = (
    "tiny-cpu",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "training.threads=1",
    "memory.budget=64MiB",
)
TIMEOUT_SECONDS = 120


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rematic.cli", "train", *TINY, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Waits until a running command has written something there."""
    while not (path.is_file() and path.stat().st_size):
        if process.poll() is not None:
            pytest.fail(f"{path} did not come: {finish(process)}")
        time.sleep(0.02)


def test_trains_in_a_capped_child_and_prints_json_alone(tmp_path: Path) -> None:
    process = start(tmp_path, "data.max_documents=3", "data.max_length=32", "--json")
    code, out, err = finish(process)
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["status"], summary["steps"], summary["batches_lost"]) == ("finished", 3, 0)
    assert summary["budget_bytes"] == 64 << 20
    assert "epoch 1, document 3 of 3" in err
    if glibc.read_heap() is not None:
        assert "memory.heap_cap has no effect here" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_a_journal_and_a_checkpoint_that_resumes(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "runs" / "tiny-cpu"
    process = start(tmp_path, "training.epochs=500")
    wait_for(run / "metrics.jsonl", process)
    os.kill(process.pid, number)
    code, out, err = finish(process)
    assert code == 128 + number, err
    assert "stopping after this step; once more stops at once" in err
    assert "run tiny-cpu: interrupted" in out
    events = list(read_journal(run / "journal.jsonl"))
    assert [event["event"] for event in events[-2:]] == ["checkpoint", "run_end"]
    num_steps = sum(event["event"] == "step" for event in events)
    if number == signal.SIGTERM:
        return  # one resume shows it

    resumed = start(
        tmp_path, f"training.max_steps={num_steps + 1}", "--resume", "runs/tiny-cpu", "--json"
    )
    code, out, err = finish(resumed)
    assert code == 0, err
    assert json.loads(out)["steps"] == num_steps + 1


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-cpu"
    process = start(tmp_path, "training.epochs=500", "training.accumulate=100000")
    wait_for(run / "metrics.jsonl", process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.5)  # longer than one key press lasts
    assert process.poll() is None  # no optimizer step ends soon
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert list(read_journal(run / "journal.jsonl"))[-1]["status"] == "interrupted"


@pytest.mark.skipif(glibc.read_heap() is None, reason="the heap cannot be capped here")
def test_the_cap_is_real_and_a_run_that_meets_it_says_so(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "model.config.hidden_size=64",
        "model.config.num_hidden_layers=12",
        "data.max_documents=3",
        "memory.budget=32MiB",
        "policy.start=keep",
        "policy.op_retry=never",
        "control.attempts=1",
    )
    code, out, err = finish(process)
    run = Path("runs") / "tiny-cpu"
    assert (code, out) == (1, "")
    assert "rematic: training failed: " in err
    assert "DefaultCPUAllocator: can't allocate memory" in err
    assert f"(details in {run / 'traceback.txt'})" in err
    summary = summarize(read_journal(tmp_path / run / "journal.jsonl"))
    assert (summary.status, summary.batches_lost) == ("failed", 1)
    assert "can't allocate memory" in (summary.reason or "")


def test_an_early_signal_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    time.sleep(1.0)  # it loads its libraries
    os.kill(process.pid, signal.SIGINT)
    code, out, _ = finish(process)
    assert (code, out) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_with_code_2_and_one_message(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, "memory.budget=100KiB"))
    assert (code, out) == (2, "")
    assert err.startswith("rematic: memory.budget is 100.0 KiB, which is smaller than the model's")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-recipe"], "no-such-recipe"),
        (["tiny-cpu", "training.epoch=2"], "epochs"),
        (["tiny-cpu", "training.epochs=many"], "training.epochs"),
        (["loop.yaml"], "the recipe extends itself"),
    ],
    ids=["recipe", "key", "type", "loop"],
)
def test_a_recipe_that_cannot_be_read_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yaml").write_text("extends: ./loop.yaml\n")
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["loop.yaml"]

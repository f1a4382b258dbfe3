from __future__ import annotations

import json
from pathlib import Path

import pytest

from rematic.cli import main
from rematic.journal import JournalWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with JournalWriter(folder / "journal.jsonl") as journal:
        journal.write({"event": "run_start", "name": "tiny", "recipe": "tiny"})
        journal.write(
            {
                "event": "step",
                "step": 1,
                "length": 8,
                "tokens": 8,
                "seconds": 1.0,
                "policy": "planned",
                "plan": {"keep": 2},
                "peak_bytes": 1 << 20,
                "budget_bytes": 2 << 20,
            }
        )
    return folder


def test_prints_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run tiny: unfinished"
    assert "peak              1.0 MiB of 2.0 MiB (50.0%), at step 1" in lines


def test_prints_json_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run / "journal.jsonl"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["peak_bytes"], summary["batches_lost"]) == (1, 1 << 20, 0)


def test_reads_a_run_that_was_killed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(run / "journal.jsonl", "ab") as file:
        file.write(b'{"schema":1,"time":1.0,"ev')
    assert main(["report", str(run)]) == 0
    assert "run tiny: unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no journal.jsonl; expected a run directory"),
        (b"", "holds no event; expected at least the start of a run"),
        (b"not a journal\n", "journal.jsonl, line 1 is not JSON"),
        (b'{"schema":9,"time":1,"event":"x"}\n', "line 1 has schema 9"),
    ],
    ids=["none", "empty", "damaged", "newer"],
)
def test_refuses_what_is_not_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "journal.jsonl").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""

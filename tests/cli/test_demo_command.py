from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence

import pytest

from rematic.cli import main
from rematic.cli.demo_command import ProgressLine
from rematic.training import demo
from rematic.training.demo_figures import DemoFigures, compare


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Replaces the demo itself, and notes with which overrides it was called."""
    calls: list[Sequence[str]] = []

    def run_demo(overrides: Sequence[str], *, show: Callable[[str], None]) -> DemoFigures:
        calls.append(overrides)
        show("[1/3] plain loop, no cap: starting")
        return compare({}, {}, lengths=[5], max_length=8, budget_bytes=1 << 20, corpus_sha256="ab")

    monkeypatch.setattr(demo, "run_demo", run_demo)
    return calls


def test_prints_the_comparison(
    asked: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert asked == [[]]
    assert "documents finished" in captured.out
    assert captured.err == "[1/3] plain loop, no cap: starting\n"


def test_prints_json_and_nothing_else(
    asked: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert asked == [[]]
    assert (figures["num_documents"], figures["budget_bytes"]) == (1, 1 << 20)


def test_options_and_overrides_change_the_recipe(asked: list[Sequence[str]]) -> None:
    assert main(["demo", "--documents", "3", "--max-length", "64", "memory.budget=1GiB"]) == 0
    assert asked == [["data.max_documents=3", "data.max_length=64", "memory.budget=1GiB"]]


def test_one_line_changes_in_a_terminal() -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    for text in ("first", "second", "x" * 500):
        line.show(text)
    line.clear()
    parts = stream.getvalue().split("\r\x1b[2K")
    assert parts[1:3] == ["first", "second"]
    assert len(parts[3]) < 500
    assert parts[-1] == ""


def test_lines_come_now_and_then_elsewhere() -> None:
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    for second in range(11):
        now[0] = float(second)
        line.show(f"second {second}")
    line.clear()
    assert stream.getvalue().splitlines() == ["second 0", "second 5", "second 10"]

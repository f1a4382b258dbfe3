from __future__ import annotations

import argparse
import subprocess
import sys
import time

import pytest

from rematic.cli import main
from rematic.version import __version__


def test_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rematic {__version__}\n"


def test_the_command_line_loads_no_more_than_the_package_itself() -> None:
    code = (
        "import sys; import rematic; before = set(sys.modules)\n"
        "from rematic.cli import main; main(['--version'])\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names & {'torch', 'lightning', 'transformers', 'yaml', 'omegaconf'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [f"rematic {__version__}", "[]"]


def test_the_module_runs_too() -> None:
    started_seconds = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rematic.cli", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "train a recipe" in done.stdout
    assert time.monotonic() - started_seconds < 20


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: RECIPE"),
        (["report"], "the following arguments are required: RUN"),
        (["demo", "--documents", "many"], "invalid int value: 'many'"),
        (["train", "tiny-cpu", "a.b=1", "--jsn", "c.d=2"], "unrecognized arguments: --jsn"),
        (["report", "somewhere", "a.b=1"], "unrecognized arguments: a.b=1"),
    ],
    ids=["nothing", "unknown", "no recipe", "no run", "not a number", "option", "no overrides"],
)
def test_refuses_an_unusable_command_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["r", "a.b=1", "c.d=2", "--resume", "x", "--json"],
        ["r", "--resume", "x", "--json", "a.b=1", "c.d=2"],
        ["--json", "r", "a.b=1", "--resume", "x", "c.d=2"],
        ["--json", "--resume", "x", "--", "r", "a.b=1", "c.d=2"],
    ],
    ids=["before options", "behind options", "around options", "behind a dash"],
)
def test_overrides_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(
        "rematic.cli.train_command.run_train", lambda arguments: seen.append(arguments) or 0
    )
    assert main(["train", *argv]) == 0
    assert (seen[0].recipe, seen[0].overrides) == ("r", ["a.b=1", "c.d=2"])
    assert (seen[0].resume, seen[0].json) == ("x", True)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("budget is 3"), 2, "rematic: budget is 3\n"),
        (RuntimeError("training failed"), 1, "rematic: training failed\n"),
        (KeyboardInterrupt(), 130, "rematic: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'lightning'", name="lightning"),
            2,
            "rematic: the package 'lightning' is not installed; this command needs the extra "
            "`train`: pip install 'rematic[train]'\n",
        ),
    ],
    ids=["user", "machine", "interrupt", "package"],
)
def test_says_what_went_wrong_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr("rematic.cli.report_command.run_report", fail)
    assert main(["report", "somewhere"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)

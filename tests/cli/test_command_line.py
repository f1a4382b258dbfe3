from __future__ import annotations

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
    ],
    ids=["nothing", "unknown", "no recipe", "no run", "not a number"],
)
def test_refuses_an_unusable_command_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


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

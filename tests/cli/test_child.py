from __future__ import annotations

import signal
import sys

import pytest

from rematic.cli import child
from rematic.cli.child import run_in_child


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is plain Python, and its only argument a program."""
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c"))


@pytest.mark.parametrize("code", [0, 1, 2, 130])
@pytest.mark.usefixtures("python")
def test_passes_the_exit_code_on(code: int) -> None:
    assert run_in_child([f"raise SystemExit({code})"]) == code


def test_runs_the_command_again() -> None:
    assert run_in_child(["--version"]) == 0
    assert run_in_child(["report", "/nowhere/at/all"]) == 2


@pytest.mark.parametrize(
    ("number", "hint"),
    [(signal.SIGKILL, "no memory left for it"), (signal.SIGABRT, "may have met the memory cap")],
)
@pytest.mark.usefixtures("python")
def test_says_how_the_process_died(
    capfd: pytest.CaptureFixture[str], number: signal.Signals, hint: str
) -> None:
    code = run_in_child([f"import os; os.kill(os.getpid(), {number.value})"])
    assert code == 128 + number
    error = capfd.readouterr().err
    assert f"was ended by signal {number.value} ({number.name})" in error
    assert hint in error


@pytest.mark.usefixtures("python")
def test_signals_wait_until_the_child_watches_for_them() -> None:
    program = (
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(7))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        "raise SystemExit(1)\n"
    )
    assert run_in_child([program]) == 7


@pytest.mark.usefixtures("python")
def test_hands_signals_on_and_puts_its_handlers_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(7))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    assert run_in_child([program]) == 7
    assert signal.getsignal(signal.SIGINT) is before

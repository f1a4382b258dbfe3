"""Runs a command again in a process of its own, and stands in for it towards the shell."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rematic.cli.exit_codes import SIGNAL_BASE
from rematic.training.environment import training_environment

COMMAND = (sys.executable, "-m", "rematic.cli")
"""What runs `rematic`."""

HANDED_ON = (signal.SIGINT, signal.SIGTERM)
"""Signals that are the child's to answer."""


def run_in_child(arguments: Sequence[str]) -> int:
    """Runs `rematic` with these arguments in a child and returns its exit code.

    The child shares terminal, process group and output. It answers Ctrl-C; whoever signals only
    this process reaches the child too.

    Args:
        arguments: What comes after the command's name.
    """
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        if not children:
            raise KeyboardInterrupt
        children[0].send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        with _signals_wait():
            child = subprocess.Popen([*COMMAND, *arguments], env=training_environment())
            children.append(child)
        code = children[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGINT:  # before it could watch for it
        raise KeyboardInterrupt
    if code >= 0:
        return code
    _report_death(-code)
    return SIGNAL_BASE - code


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Starts a child in which signals wait until it watches for them, as `StopRequest` does."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _report_death(number: int) -> None:
    name = signal.Signals(number).name
    hint = (
        "the system had no memory left for it: give the machine more, or lower memory.budget"
        if number == signal.SIGKILL
        else "an allocation outside torch may have met the memory cap: raise memory.budget, or "
        "set memory.heap_cap=false"
    )
    print(
        f"rematic: the training process was ended by signal {number} ({name}), which it could not "
        f"answer; {hint}. Its journal is readable, and --resume goes on from its last checkpoint",
        file=sys.stderr,
    )

"""`rematic demo`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rematic.cli.exit_codes import DONE

LINE_INTERVAL_SECONDS = 5.0
"""Least time between two lines where there is no terminal."""


def run_demo(arguments: argparse.Namespace) -> int:
    """Runs the demo and prints the comparison.

    Raises:
        ValueError: An argument or the recipe cannot be used.
        RuntimeError: A part of the demo failed in a way that was not meant.
    """
    from rematic.training import demo
    from rematic.training.demo_report import format_demo

    overrides = [
        f"{key}={value}"
        for key, value in (
            ("data.max_documents", arguments.documents),
            ("data.max_length", arguments.max_length),
        )
        if value is not None
    ]
    progress = ProgressLine(sys.stderr)
    try:
        figures = demo.run_demo([*overrides, *arguments.overrides], show=progress.show)
    finally:
        progress.clear()
    print(json.dumps(figures.to_dict()) if arguments.json else format_demo(figures))
    return DONE


class ProgressLine:
    """One line that changes in a terminal; a line now and then elsewhere.

    Args:
        stream: Where it is shown.
        clock: Returns seconds that never go back.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._shown_at_seconds: float | None = None

    def show(self, text: str) -> None:
        """Shows what is going on."""
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write("\r\x1b[2K" + text[: columns - 1])
            self._stream.flush()
            return
        now = self._clock()
        if self._shown_at_seconds is None or now - self._shown_at_seconds >= LINE_INTERVAL_SECONDS:
            self._shown_at_seconds = now
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Takes the line away, so that what follows starts at the left."""
        if self._is_terminal:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

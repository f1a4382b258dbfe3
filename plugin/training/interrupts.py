"""Turns Ctrl-C into a request that is honoured where nothing is torn."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

SAME_REQUEST_SECONDS = 1.0
"""Signals that follow the first within this time are the same key press: a terminal sends it to
every process of the group, and a parent hands it on."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What asks a run to stop."""


class StopRequest:
    """Watches for Ctrl-C, as a context manager.

    The first signal raises KeyboardInterrupt, unless the code in between is `deferring`: then it
    only sets `signal_number`, and whoever defers looks at it at the next boundary. A second
    signal raises in any case. Outside the main thread nothing is watched.

    Args:
        clock: Returns seconds that never go back.
        notify: Is told, in words, that a deferred request was heard.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._clock = clock
        self._notify = notify
        self._heard_at_seconds: float | None = None
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self.deferring = False
        """Whether the first signal waits for a boundary."""
        self.signal_number: int | None = None
        """The signal that asked to stop; None: nobody did."""

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """Lets the first signal wait for a boundary, and takes signals back from a host.

        (Lightning 2.6 answers SIGTERM itself, in the middle of an accumulation if it must.)
        """
        self.deferring = True
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        first = self._heard_at_seconds is None
        if not first and now - (self._heard_at_seconds or 0.0) < SAME_REQUEST_SECONDS:
            return
        self._heard_at_seconds = now
        self.signal_number = number
        if first and self.deferring:
            self._notify("stopping after this step; once more stops at once")
            return
        raise KeyboardInterrupt

"""Turns Ctrl-C into a request that is honoured where nothing is torn."""

from __future__ import annotations

import signal
import sys
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
        self._until = ""
        self.deferring = False
        """Whether the first signal waits for a boundary."""
        self.signal_number: int | None = None
        """The signal that asked to stop; None: nobody did."""

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            if sys.platform != "win32":  # a parent may have kept them waiting until now
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self, until: str) -> None:
        """Lets the first signal wait for a boundary, and takes signals back from a host.

        (Lightning 2.6 answers SIGTERM itself, in the middle of an accumulation if it must.)

        Args:
            until: When the boundary comes, for the person who waits for it.
        """
        self.deferring = True
        self._until = until
        for number in self._before:
            signal.signal(number, self._handle)

    def stop_deferring(self) -> None:
        """Ends the waiting: the next signal raises."""
        self.deferring = False

    def raise_if_asked(self) -> None:
        """Answers a signal that has waited.

        Raises:
            KeyboardInterrupt: There was one.
        """
        if self.signal_number is not None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        first = self._heard_at_seconds is None
        if not first and now - (self._heard_at_seconds or 0.0) < SAME_REQUEST_SECONDS:
            return
        self._heard_at_seconds = now
        self.signal_number = number
        if first and self.deferring:
            self._notify(f"stopping {self._until}; once more stops at once")
            return
        raise KeyboardInterrupt

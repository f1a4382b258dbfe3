"""Appends events to a journal file, one JSON object per line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from rematic.journal.events import DURABLE_KINDS, HEADER_FIELDS, SCHEMA_VERSION, JournalError
from rematic.journal.parts import close_part, finish_closing

_log = logging.getLogger("rematic")
PART_BYTES = 64 << 20
"""A file that is larger is closed, and a new one begun."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class JournalWriter:
    """Append-only writer of a journal.

    A line is handed to the operating system in one write, so a killed process leaves whole lines
    and at most one torn line at the end; opening the file again removes that torn line. Events
    of `DURABLE_KINDS`, and closing, also wait for the disk.

    A warning is logged if another writer, of whatever process, writes the file: two runs in one
    journal cannot be told apart.

    Args:
        path: File to append to; it is created when it does not exist, its folder is not.
        clock: Returns seconds since the epoch.
        part_bytes: Size from which a file is closed under a number and a new one begun.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.path = Path(path)
        self._part_bytes = part_bytes
        finish_closing(self.path)
        self._clock = clock
        self._lock = threading.Lock()
        self._file = _opened(self.path)
        self._repair_tail()
        self._is_marked = False

    def write(self, event: Mapping[str, object]) -> None:
        """Appends one event.

        Args:
            event: Plain values under string keys, with the kind under `event`.

        Raises:
            JournalError: The event has no kind, sets a field of the header, or holds a value that
                is not plain; or the journal is closed.
            OSError: The line could not be written; none of it is left in the file.
        """
        line = self._line(event)
        with self._lock:
            if self._file.closed:
                raise JournalError(f"{self.path} is closed: event {event['event']!r} came too late")
            if not self._is_marked:
                self._mark()
            size_bytes = self._append(line)
            if event["event"] in DURABLE_KINDS:
                os.fsync(self._file.fileno())
            if size_bytes > self._part_bytes:
                self._begin_part()

    def close(self) -> None:
        """Waits for the disk and closes the file; a second call does nothing."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())
                # not by closing alone: forked workers may have it open
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
                self._file.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _line(self, event: Mapping[str, object]) -> bytes:
        kind = event.get("event")
        if not isinstance(kind, str) or not kind:
            raise JournalError(f"an event needs its kind as a word under 'event', got {kind!r}")
        for field in HEADER_FIELDS[:2]:
            if field in event:
                raise JournalError(f"event {kind!r} sets {field!r}, which the writer sets itself")
        head = {"schema": SCHEMA_VERSION, "time": round(self._clock(), 6)}
        try:
            text = _ENCODER.encode({**head, **event})
        except (TypeError, ValueError):  # what JSON lacks: looked at value by value
            plain = {key: _plain(value, where=f"{kind}.{key}") for key, value in event.items()}
            text = _ENCODER.encode({**head, **plain})
        return (text + "\n").encode()

    def _mark(self) -> None:
        """Marks the file as being written, as late as this: other ranks open it, too."""
        self._is_marked = True
        if not _is_alone(self._file):
            _log.warning(
                "%s is being written by another run: expected a journal for each, as their events "
                "cannot be told apart afterwards. Give this one another path.",
                self.path,
            )

    def _append(self, line: bytes) -> int:
        """Writes a line and returns the size of the file."""
        size_before_bytes = os.fstat(self._file.fileno()).st_size
        written = self._file.write(line)
        if written != len(line):
            os.ftruncate(self._file.fileno(), size_before_bytes)
            raise OSError(
                f"{self.path}: {written} of {len(line)} bytes of an event could be written; "
                "free some space on its disk"
            )
        return size_before_bytes + written

    def _begin_part(self) -> None:
        os.fsync(self._file.fileno())
        if not close_part(self.path):
            self._part_bytes *= 2  # no hard links here: the file goes on
            return
        before, self._file = self._file, _opened(self.path)
        self._mark()
        before.close()

    def _repair_tail(self) -> None:
        """Drops a line that an earlier process could not finish, so that no line is torn inside."""
        size_bytes = os.fstat(self._file.fileno()).st_size
        if not size_bytes:
            return
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end_of_last_line = content.rfind(b"\n") + 1
        if end_of_last_line != size_bytes:
            os.ftruncate(self._file.fileno(), end_of_last_line)


def _opened(path: Path) -> BinaryIO:
    return open(path, "a+b", buffering=0)  # closed by `close`


def _is_alone(file: BinaryIO) -> bool:
    """Marks a file as being written, as long as it is open; returns whether it was not so yet."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _plain(value: object, *, where: str) -> object:
    """The value as JSON can hold it; a number that JSON lacks becomes a word.

    Raises:
        JournalError: The value is not plain.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    raise JournalError(
        f"{where} is a {type(value).__name__}, which a journal cannot hold; "
        "expected None, a bool, a number, a string, or lists and mappings of those"
    )

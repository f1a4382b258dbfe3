"""Follows a journal that a running job writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rematic.journal.reader import parse_line


class JournalTail:
    """Reads what is appended after it was made, also over the closing of a part.

    Args:
        path: The journal file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115  # closed with the object
        self._file.seek(0, os.SEEK_END)

    def read(self) -> Iterator[dict[str, object]]:
        """Yields the whole lines that have come since the last call."""
        yield from self._lines()
        if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
            yield from self._lines()  # what came before the part was closed
            self._file.close()
            self._file = open(self._path, "rb")  # noqa: SIM115
            yield from self._lines()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _lines(self) -> Iterator[dict[str, object]]:
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):  # the end, or a line that is still being written
                self._file.seek(start)
                return
            yield parse_line(line, where=str(self._path))

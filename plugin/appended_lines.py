"""Reads what others append to a file, some of it at a time, whatever they put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path


class AppendedLines:
    """The whole lines of a file behind the last one read.

    A file that is shorter than before, or another one of that size, is read from its start. What is
    no regular file, or cannot be read, has no lines.

    Args:
        path: The file, which need not exist.
        most_bytes: Read at once; of a longer line that many bytes are given, once, and the rest is
            passed over.
    """

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._offset = 0
        self._inode: int | None = None
        self._is_inside = False
        """Whether a line that is too long goes on at the offset."""

    def read(self) -> list[bytes]:
        """Returns the next lines, without their ends; none where nothing has come."""
        try:
            start, size_bytes = self._start()
            if size_bytes <= start:
                return []
            with open(self._path, "rb") as file:
                file.seek(start)
                content = file.read(self._most_bytes)
        except OSError:
            return []
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) == self._most_bytes:
            whole, lines = len(content), [] if self._is_inside else [content]
            self._is_inside = True
        else:  # a line that is still being written comes next time
            lines = content[:whole].split(b"\n")[:-1]
            if self._is_inside and lines:
                del lines[0]
                self._is_inside = False
        self._offset = start + whole
        return lines

    def read_to_end(self, *, last_bytes: int) -> Iterator[bytes]:
        """Yields what is in the file already, of a long one the last lines only."""
        try:
            self._offset = max(0, self._start()[1] - last_bytes)
        except OSError:
            return
        before = -1
        while self._offset != before:
            before = self._offset
            yield from self.read()

    def _start(self) -> tuple[int, int]:
        """Returns where to go on, and the size of the file."""
        status = os.stat(self._path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep whoever opens it waiting
            return 0, 0
        is_other = self._inode not in (None, status.st_ino) and status.st_size == self._offset
        self._inode = status.st_ino
        if is_other or status.st_size < self._offset:
            self._offset, self._is_inside = 0, False
        return self._offset, status.st_size

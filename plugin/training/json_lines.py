"""Files with one JSON object a line, beside the journal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from rematic.whole_files import write_whole


class JsonLines:
    """A file that a training appends to, and goes on without where its disk takes nothing.

    Args:
        path: The file.
        notify: Is told, once, that lines are missing.
    """

    def __init__(self, path: Path, *, notify: Callable[[str], None]) -> None:
        self._path = path
        self._notify = notify
        self._has_told = False

    def append(self, values: Mapping[str, object]) -> None:
        """Appends an object; a number that JSON lacks becomes a word, as in the journal.

        Args:
            values: Text, numbers, truth values and None.
        """
        try:
            _append(self._path, values)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                self._notify(
                    f"{self._path} cannot be written: {error}; the training goes on, and what is "
                    "measured meanwhile is missing there"
                )

    def drop_after(self, name: str, last: int) -> None:
        """Drops what a resumed run does again, and lines that are torn.

        Args:
            name: A field with a number.
            last: The highest that stays.
        """
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _number(line, name) <= last]
        if kept != lines:
            write_whole(self._path, b"".join(kept))


def _append(path: Path, values: Mapping[str, object]) -> None:
    spelled = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    line = (json.dumps(spelled, allow_nan=False) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        written = file.write(line)
        if written != len(line):
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - (written or 0))
            raise OSError(f"{written} of {len(line)} bytes of a line could be written")


def _number(line: bytes, name: str) -> float:
    """Returns a number of a line; infinite where the line is torn."""
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return float(json.loads(line)[name])
    except (KeyError, TypeError, ValueError):
        return math.inf

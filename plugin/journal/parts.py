"""The files of one journal: closed parts with numbers, and the one that is written to.

`journal.jsonl` is closed by giving it a second name, `journal.0001.jsonl`, and replacing the first
by an empty file, so that at no moment there is no journal. A process that dies in between leaves
two names for one file, which readers count once and the next writer finishes.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path


def closed_parts(path: Path) -> list[Path]:
    """Returns the closed parts of a journal, oldest first."""
    return [part for _, part in sorted(_numbered(path).items())]


def missing_parts(path: Path) -> list[Path]:
    """Returns the closed parts that a journal must have had and that are gone, oldest first."""
    numbered = _numbered(path)
    last = max(numbered, default=0)
    return [_closed(path, number) for number in range(1, last) if number not in numbered]


def _numbered(path: Path) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{4,}}){re.escape(path.suffix)}")
    return {
        int(match[1]): part
        for part in path.parent.glob(f"{glob.escape(path.stem)}.*{path.suffix}")
        if (match := pattern.fullmatch(part.name)) and not _is_same(part, path)
    }


def _closed(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def close_part(path: Path) -> bool:
    """Closes the file that is written to; an empty one takes its place.

    Returns:
        Whether that could be done; a file system without hard links cannot.
    """
    closed = _closed(path, 1 + max(_numbered(path), default=0))
    try:
        if not (closed.exists() and _is_same(closed, path)):
            os.link(path, closed)
        _replace_by_empty(path)
    except OSError:
        return False
    return True


def finish_closing(path: Path) -> None:
    """Finishes what a process that died while closing a part has left."""
    for part in path.parent.glob(f"{glob.escape(path.stem)}.*{path.suffix}"):
        if part != path and path.exists() and _is_same(part, path):
            _replace_by_empty(path)
            return


def _replace_by_empty(path: Path) -> None:
    empty = path.with_name(f".{path.name}.new")
    empty.touch()
    os.replace(empty, path)


def _is_same(part: Path, path: Path) -> bool:
    return path.exists() and part.samefile(path)

"""The files of one journal: closed parts with numbers, and the one that is written to.

`journal.jsonl` is closed by giving it a second name, `journal.0001.jsonl`, and replacing the first
by an empty file, so that at no moment there is no journal. A process that dies in between leaves
two names for one file, which readers count once and the next writer finishes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def closed_parts(path: Path) -> list[Path]:
    """Returns the closed parts of a journal, oldest first."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{4,}}){re.escape(path.suffix)}")
    found = [
        (int(match[1]), part)
        for part in path.parent.glob(f"{path.stem}.*{path.suffix}")
        if (match := pattern.fullmatch(part.name))
    ]
    return [part for _, part in sorted(found) if not _is_same(part, path)]


def close_part(path: Path) -> bool:
    """Closes the file that is written to; an empty one takes its place.

    Returns:
        Whether that could be done; a file system without hard links cannot.
    """
    parts = closed_parts(path)
    number = 1 + (int(parts[-1].name.split(".")[-2]) if parts else 0)
    closed = path.with_name(f"{path.stem}.{number:04d}{path.suffix}")
    try:
        if not (closed.exists() and _is_same(closed, path)):
            os.link(path, closed)
        _replace_by_empty(path)
    except OSError:
        return False
    return True


def finish_closing(path: Path) -> None:
    """Finishes what a process that died while closing a part has left."""
    for part in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        if part != path and path.exists() and _is_same(part, path):
            _replace_by_empty(path)
            return


def _replace_by_empty(path: Path) -> None:
    empty = path.with_name(f".{path.name}.new")
    empty.touch()
    os.replace(empty, path)


def _is_same(part: Path, path: Path) -> bool:
    return path.exists() and part.samefile(path)

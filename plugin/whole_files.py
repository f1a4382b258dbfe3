"""Writes files and folders so that they are whole or as they were before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_when_whole(folder: Path) -> Iterator[Path]:
    """Puts a new folder in the place of one when the context ends well.

    Until then what was there stays, also where the process is killed; where writing fails, what
    was written is removed, which gives a full disk its room back.

    Args:
        folder: Where it is to be.

    Yields:
        A folder beside it, in which one with the name of `folder` is to be written.
    """
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        (unfinished / folder.name).replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file; whoever is killed meanwhile leaves the old one whole.

    Args:
        path: The file, whose folder must be there.
        content: All that it is to hold.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

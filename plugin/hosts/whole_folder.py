"""Writes a folder so that it is whole or not there."""

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

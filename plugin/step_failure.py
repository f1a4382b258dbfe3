"""What an attempt says that ran out of memory."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

import rematic
from rematic.memory import requested_bytes


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An attempt that ran out of memory, in plain values: it keeps nothing alive."""

    error: str
    """The words of the allocator."""

    where: str
    """The line of code that was running."""

    needed_bytes: int | None
    """Bytes in use then and those asked for."""


def read_failure(error: BaseException, in_use_bytes: int | None) -> Failure:
    """Returns what an out-of-memory error says, in plain values.

    Args:
        error: The error.
        in_use_bytes: Bytes in use now, None if unknown.
    """
    return Failure(
        error=str(error).split("\n")[0],
        where=_where(error),
        needed_bytes=None if in_use_bytes is None else in_use_bytes + requested_bytes(error),
    )


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # By folder, not by name: an editable install lies in `plugin`, a user's script anywhere.
    inner = [Path(home) for package in (torch, rematic) for home in package.__path__]
    outside = [f for f in frames if not any(Path(f.filename).is_relative_to(d) for d in inner)]
    frame = (outside or frames)[-1] if frames else None
    if frame is None:
        return "unknown"
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"

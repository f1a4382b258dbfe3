"""Writes what CUDA's allocator holds to a file when a training stops for lack of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from rematic.activations import torch_private
from rematic.control import StopReport
from rematic.journal import EventSink

_log = logging.getLogger("rematic")
FILE_NAME = "rematic-memory-snapshot.pickle"
"""What the file is called, in the folder of the emergency checkpoint or of the journal."""


def save_memory_snapshot(report: StopReport, journal: EventSink) -> str | None:
    """Writes the blocks that are in use after everything that can be let go was.

    With their stack traces if `torch.cuda.memory._record_memory_history()` was called before.

    Args:
        report: The report; its checkpoint says where.
        journal: Says where if there is no checkpoint and it writes to a file.

    Returns:
        The path; None where nothing runs on CUDA, no folder is known, or it cannot be written.
    """
    write, beside = torch_private.memory_snapshot_writer(), _beside(report, journal)
    if write is None or beside is None:
        return None
    return _written(write, beside.with_name(_file_name()))


def _beside(report: StopReport, journal: EventSink) -> Path | None:
    path = getattr(journal, "path", None) if report.checkpoint is None else report.checkpoint
    return Path(path) if isinstance(path, str | Path) else None


def _file_name() -> str:
    ranks = torch.distributed
    if not ranks.is_available() or not ranks.is_initialized():
        return FILE_NAME
    return FILE_NAME.replace(".", f"-rank{ranks.get_rank()}.")


def _written(write: Callable[[str], None], path: Path) -> str | None:
    try:
        write(str(path))
    except Exception as error:  # whatever it is, it must not hide why the training stops
        _log.warning("the memory snapshot could not be written to %s: %s", path, error)
        return None
    return str(path)

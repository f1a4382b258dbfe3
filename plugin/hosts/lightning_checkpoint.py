"""Saves a Trainer of Lightning that is about to stop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from torch.utils._pytree import tree_leaves

from rematic.at_stop import refuse_to_save
from rematic.session import Session

CHECKPOINT_NAME = "rematic-emergency.ckpt"
"""File in the Trainer's `default_root_dir` that a stopped training is saved to."""
_log = logging.getLogger("rematic")
_COUNTS = ("ready", "started", "processed", "completed")
"""What a loop counts of its batches."""


def save_emergency_checkpoint(
    trainer: pl.Trainer, session: Session, *, num_done: int, path: Path | None = None
) -> str:
    """Saves a training as it was behind its last optimizer step; returns where.

    Args:
        trainer: The Trainer.
        session: The session.
        num_done: Batches before the first one of the update that was not made.
        path: The file, of a caller who puts back the loader too; None for `rematic-emergency.ckpt`
            in the Trainer's `default_root_dir`.

    Raises:
        NotSavedError: If it should not be saved.
    """
    refuse_to_save(session, num_ranks=trainer.world_size)
    if path is None:
        path = Path(trainer.default_root_dir) / CHECKPOINT_NAME
        _tell_of_loaders(trainer)
    with _counted_back(trainer, num_done):
        trainer.save_checkpoint(path)
    return str(path)


def _tell_of_loaders(trainer: pl.Trainer) -> None:
    """Says what nobody here can put back."""
    loaders = tree_leaves(trainer.train_dataloader)
    if any(hasattr(loader, "load_state_dict") for loader in loaders):
        _log.warning(
            "the train dataloader is saved with its state as it is now: the batch that failed, and "
            "those since the last optimizer step, were taken from it and do not come again."
        )


@contextmanager
def _counted_back(trainer: pl.Trainer, num_done: int) -> Iterator[None]:
    """Lets the loop's counts say that so many batches are finished, and no other has begun."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    before = [(counts, vars(counts).copy()) for counts in (progress.current, progress.total)]
    num_more = progress.total.completed - num_done
    for counts, values in before:
        vars(counts).update(dict.fromkeys(_COUNTS, values["completed"] - num_more))
    try:
        yield
    finally:
        for counts, values in before:
            vars(counts).update(values)

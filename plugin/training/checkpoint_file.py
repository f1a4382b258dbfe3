"""Writes checkpoints straight to the disk, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override


class CheckpointFile(TorchCheckpointIO):
    """Streams a checkpoint into a file beside the old one and then takes its place.

    The stock plugin of Lightning 2.6 first serialises into memory, twice: under a memory budget
    that is what a checkpoint must not need.
    """

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Saves under `path`; a file that is there stays whole until the new one is.

        Args:
            checkpoint: What Lightning's dump holds.
            path: A local path.
            storage_options: Must be None: only local files are written.
        """
        if storage_options is not None:
            raise ValueError(f"storage_options is {storage_options!r}; expected None, a local file")
        unfinished = Path(f"{os.fspath(path)}.unfinished")
        try:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

"""The places of one model: made when an action first needs them, closed with the engine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from rematic.policy import Action, Compress, Offload, RecomputeOffload
from rematic.stash import CompressStash, DiskStash, HostStash, Stash


class StashPlaces:
    """Makes the stash that an action moves tensors to.

    Args:
        device: Where the model's tensors are. On a CPU they move to disk, on an accelerator to
            host memory and from there to disk.
        scratch_dir: Folder of the scratch file; None for a temporary one of its own.
    """

    def __init__(self, device: torch.device, scratch_dir: str | Path | None) -> None:
        self._device = device
        self._scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._temporary_dir: Path | None = None
        self._stashes: dict[str, Stash] = {}

    def of(self, action: Action) -> Stash | None:
        """Returns where `action` moves tensors, None if it moves none.

        Raises:
            ValueError: If the place cannot be made: an unwritable folder, a missing package.
        """
        if isinstance(action, Compress):
            return self._named("compress")
        if isinstance(action, (Offload, RecomputeOffload)):
            return self._named("offload")
        return None

    def close(self) -> None:
        """Gives up every place and removes the temporary folder."""
        for stash in self._stashes.values():
            stash.close()
        self._stashes.clear()
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None

    def _named(self, kind: str) -> Stash:
        if kind not in self._stashes:
            self._stashes[kind] = CompressStash() if kind == "compress" else self._away()
        return self._stashes[kind]

    def _away(self) -> Stash:
        disk = DiskStash(self._directory())
        return disk if self._device.type == "cpu" else HostStash(overflow=disk)

    def _directory(self) -> Path:
        if self._scratch_dir is not None:
            return self._scratch_dir
        if self._temporary_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="rematic-"))
        return self._temporary_dir

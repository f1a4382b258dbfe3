"""The places of one model: made when an action first needs them, closed with the engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rematic.activations.compress_errors import MeasuredCompressStash
from rematic.activations.notices import Notice
from rematic.policy import Action, Compress, Offload, RecomputeOffload
from rematic.stash import CompressStash, DiskStash, HostStash, Stash


class StashPlaces:
    """Makes the stash that an action moves tensors to.

    Args:
        device: Where the model's tensors are. On a CPU they move to disk, on an accelerator to
            host memory and from there to disk.
        scratch_dir: Folder of the scratch file; None for a temporary one of its own.
        tell: Takes what is found out about a unit.
    """

    def __init__(
        self, device: torch.device, scratch_dir: str | Path | None, tell: Callable[[Notice], None]
    ) -> None:
        self._device = device
        self._tell = tell
        self._measured: dict[str, MeasuredCompressStash] = {}
        self._scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._temporary_dir: Path | None = None
        self._compress: CompressStash | None = None
        self._offload: Stash | None = None

    def of(self, action: Action, unit_name: str) -> Stash | None:
        """Returns where `action` moves the tensors of a unit, None if it moves none.

        Raises:
            ValueError: If the place cannot be made: an unwritable folder, a missing package.
        """
        if isinstance(action, Compress):
            return self._compressing(unit_name)
        if isinstance(action, (Offload, RecomputeOffload)):
            if self._offload is None:
                self._offload = self._away()
            return self._offload
        return None

    def close(self) -> None:
        """Gives up every place and removes the temporary folder."""
        for stash in (self._compress, self._offload):
            if stash is not None:
                stash.close()
        self._compress = self._offload = None
        self._measured.clear()
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None

    def _compressing(self, unit_name: str) -> Stash:
        if unit_name not in self._measured:
            if self._compress is None:
                self._compress = CompressStash()

            def tell(text: str, figures: Mapping[str, float]) -> None:
                self._tell(Notice(unit=unit_name, kind="compress", text=text, figures=figures))

            self._measured[unit_name] = MeasuredCompressStash(self._compress, tell)
        return self._measured[unit_name]

    def _away(self) -> Stash:
        disk = DiskStash(self._directory())
        return disk if self._device.type == "cpu" else HostStash(overflow=disk)

    def _directory(self) -> Path:
        if self._scratch_dir is not None:
            return self._scratch_dir
        if self._temporary_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="rematic-"))
        return self._temporary_dir

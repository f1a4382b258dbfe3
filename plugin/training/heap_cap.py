"""Makes the budget of a CPU run a limit that the operating system enforces."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rematic.memory import capped_heap, warm_up_threads

if TYPE_CHECKING:
    from rematic.memory import CappedHeap


class HeapCap(Callback):
    """Caps the heap of this process between the start and the end of a fit.

    The cap leaves what the budget has left over what is in use when training starts.

    Args:
        room_bytes: Gives the bytes that may still be allocated then.
        notify: Is told, in words, where this platform has no cap.
    """

    def __init__(self, room_bytes: Callable[[], int], *, notify: Callable[[str], None]) -> None:
        self._room_bytes = room_bytes
        self._notify = notify
        self._cap: CappedHeap | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the cap, after what needs threads has started them, and what is imported late."""
        warm_up_threads()
        _warm_up_saving()
        cap = capped_heap(self._room_bytes())
        try:
            self._cap = cap.__enter__()
        except RuntimeError as error:
            self._notify(f"memory.heap_cap has no effect here: {error}")

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Frees what the handlers of the error need."""
        if self._cap is not None:
            self._cap.release_ballast()
        self._lift()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the cap."""
        self._lift()

    def _lift(self) -> None:
        if self._cap is not None:
            self._cap.__exit__(None, None, None)
        self._cap = None


def _warm_up_saving() -> None:
    """Imports what the first checkpoint would import: under the cap a batch would lack the room."""
    importlib.import_module("omegaconf")  # by Lightning 2.6
    torch.save({}, io.BytesIO())

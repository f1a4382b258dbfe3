"""What every place for saved tensors offers: put them away, get them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

MIN_BYTES = 2**16
"""Size of a storage below which moving it costs more in calls than it brings in bytes."""


class StashError(RuntimeError):
    """Nothing was moved: every tensor of that `put` is where it was, whole."""


class Handle(Protocol):
    """Stands for one tensor that was put away; what it stands for is freed when it dies."""

    @property
    def nbytes(self) -> int:
        """Bytes that come into the memory of the device with it.

        The handles of tensors that share a storage share them.
        """
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes that the stash holds for it, shared in the same way."""
        ...

    def get(self) -> torch.Tensor:
        """Returns the tensor: shape, stride, dtype, device and bits as they were.

        Handles of tensors that shared a storage return tensors that share one, as long as one of
        these is alive. May be called any number of times.
        """
        ...


class Stash(Protocol):
    """A place for saved tensors.

    It knows no handle: whoever holds handles holds what they stand for, and nothing else does.
    """

    name: str
    """What the journal calls it."""

    @property
    def lossy(self) -> bool:
        """Whether a tensor may come back with other bits."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that are held for living handles."""
        ...

    def put(self, tensors: Sequence[torch.Tensor]) -> Sequence[Handle | None]:
        """Takes the bytes of tensors; tensors that share a storage are moved once.

        The memory is free when the caller lets go of the tensors. All of them must be put in one
        call, as a storage is freed only when nobody holds a view of it.

        Returns:
            A handle for each tensor, None for one that is not taken and stays with the caller
            (`refusal` says why).

        Raises:
            StashError: If there is no room left, or the place cannot be written. Nothing is
                taken then.
        """
        ...

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Begins to bring back what `get` will be asked for next; may do nothing."""
        ...

    def close(self) -> None:
        """Gives up the place; handles that are alive can no longer be read."""
        ...

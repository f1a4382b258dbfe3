"""What is left when nothing can be evicted: memory may be short for a moment only."""

from __future__ import annotations

import gc

import torch


class LastTries:
    """A few tries after freeing what nobody uses: reference cycles, and an allocator's cache.

    (A cycle that holds tensors lives until Python's collector comes by; an exception that was
    caught, a figure, a closure make one.)

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self._num_left = number

    @property
    def are_left(self) -> bool:
        """Whether there is one."""
        return self._num_left > 0

    def take(self) -> bool:
        """Frees what nobody uses and returns True, if a try is left."""
        if not self.are_left:
            return False
        self._num_left -= 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

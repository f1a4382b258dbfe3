"""Where a training stood behind its last optimizer step, which is what a checkpoint can hold.

Gradients are in no checkpoint. So the micro-batches since that step come again when a training is
resumed, and their traces (statistics, random numbers) must not be in the checkpoint either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rematic.memory import is_out_of_memory
from rematic.transaction import StepTransaction, TensorCopies

_log = logging.getLogger("rematic")
Generators = Sequence[tuple[Any, Any]]
"""Generators with the states that they are to have."""


class AccumulationWindow:
    """The micro-batches of one update, and the state before the first of them.

    It takes over what the first one's transaction has copied anyway.

    Args:
        num_steps: Micro-batches finished before it.
        num_boundaries: How often optimizers had stepped before it.
    """

    def __init__(self, *, num_steps: int = 0, num_boundaries: int = 0) -> None:
        self.num_steps = num_steps
        self.num_boundaries = num_boundaries
        self._is_read = False
        self._tensors = TensorCopies()
        self._generators: Generators = ()

    def read(self, transaction: StepTransaction) -> None:
        """Takes the state before the first micro-batch; later ones are passed over."""
        if not self._is_read:
            self._is_read = True
            self._tensors, self._generators = transaction.copies_for_checkpoint()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Goes back to the beginning of the window while the context is entered."""
        try:
            tensors = self._tensors.now()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _log.warning(
                "there is no room to put statistics back to where they were behind the last "
                "optimizer step: those that are saved hold what micro-batches since then have done."
            )
            yield
            return
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        _put(self._tensors, self._generators)
        try:
            yield
        finally:
            _put(tensors, generators)


def _put(tensors: TensorCopies, generators: Generators) -> None:
    tensors.put()
    for generator, state in generators:
        generator.set_state(state)
    torch.clear_autocast_cache()

"""Finds memory for an op of the optimizer's step, which cannot be repeated as a whole."""

from __future__ import annotations

import gc

import torch

from rematic.activations import Ledger

_BARE_TRIES = 2
"""Ops of one optimizer step that are tried again although no record gave way."""


class OptimizerRelief:
    """Evicts records; where there are none, collects what is garbage and lets the op try once more.

    (Between steps there are few records, and memory may be short for a moment only: blocks that
    the allocator caches, tensors in reference cycles.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._num_left = _BARE_TRIES

    def __call__(self, num_bytes: int, where: str) -> int:
        """Returns the bytes freed, 1 for a try without any; 0 lets the failure stand."""
        freed = self._ledger.evict(num_bytes).bytes_freed
        if freed:
            return freed
        self._num_left -= 1
        if self._num_left < 0:
            return 0
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return 1

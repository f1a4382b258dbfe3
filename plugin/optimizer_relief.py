"""Finds memory for an op of the optimizer's step, which cannot be repeated as a whole."""

from __future__ import annotations

from rematic.activations import Ledger
from rematic.memory import LastTries

_LAST_TRIES = 2
"""Ops of one optimizer step that are tried again although no record gave way."""


class OptimizerRelief:
    """Evicts records; where there are none, lets the op try once more all the same.

    (Between steps there are few records.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last_tries = LastTries(_LAST_TRIES)

    def __call__(self, num_bytes: int, where: str) -> int:
        """Returns the bytes freed, 1 for a try without any; 0 lets the failure stand."""
        return self._ledger.evict(num_bytes).bytes_freed or int(self._last_tries.take())

"""Finds memory for an op of the optimizer's step, which cannot be repeated as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rematic import control
from rematic.activations import Ledger, OpRetry
from rematic.memory import LastTries, MemorySnapshot
from rematic.session_settings import SessionSettings
from rematic.training_tensors import tensor_bytes

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


def retry_of_update(
    parameters: Callable[[], int],
    ledger: Ledger,
    settings: SessionSettings,
    before: MemorySnapshot | None,
) -> OpRetry | None:
    """Returns the retry that covers an update, or what is done to gradients before it.

    Args:
        parameters: Returns the bytes of the parameters.
        ledger: The records that may give way.
        settings: What the session keeps to.
        before: Memory when the last micro-batch ended; None if none has, or if one is open.

    Returns:
        The retry, None where none is needed.
    """
    covered = settings.op_retry == "always"
    if settings.op_retry == "auto" and settings.budget_bytes is not None:
        covered = before is None or not control.fits_update(
            in_use_bytes=before.allocated_bytes,
            parameter_bytes=parameters(),
            budget_bytes=settings.budget_bytes,
            capacity_bytes=before.capacity_bytes,
            reserve=settings.reserve,
        )
    return OpRetry(OptimizerRelief(ledger)) if covered else None


def optimizer_bytes(*optimizers: torch.optim.Optimizer) -> int:
    """Returns the bytes of the parameters of optimizers."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return sum(tensor_bytes(p) for group in groups for p in group["params"])

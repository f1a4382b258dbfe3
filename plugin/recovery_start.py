"""Begins the recovery of a micro-batch: what it puts back, and who else trains with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rematic.step_recovery import RecoverableStep, StepRecovery, with_room
from rematic.transaction import (
    ChangingState,
    DataParallelStep,
    StepTransaction,
    find_wrapper,
    num_ranks,
    sharding_obstacle,
)

_UNKNOWN_WRAPPER = (
    "several ranks train together, and only under DistributedDataParallel one of them can repeat a "
    "step by itself."
)


def begin_recovery(
    step: RecoverableStep,
    model: nn.Module,
    batch: object,
    *,
    changing: ChangingState,
    others: Iterable[nn.Module] = (),
    code: Callable[..., Any] | None = None,
    leaves: Iterable[torch.Tensor] = (),
    skipped: frozenset[str] = frozenset(),
    counts_gradients: bool = True,
) -> StepRecovery:
    """Takes down what a micro-batch can change, evicting if there is no room for that.

    Args:
        step: The session, with the step open.
        model: The model.
        batch: What the step is given.
        changing: What steps were seen to change.
        others: Modules outside the model that the step changes, such as a host's metrics.
        code: What runs as the step, whose closures and globals are looked at.
        leaves: What else is trained with the model.
        skipped: Names of attributes of modules that belong to a host.
        counts_gradients: As of `StepTransaction`.

    Raises:
        StepOutOfMemoryError: If there is no room even so.
    """
    make = functools.partial(
        StepTransaction,
        model,
        batch,
        changing=changing,
        others=others,
        step=code,
        leaves=leaves,
        skipped=skipped,
        counts_gradients=counts_gradients,
    )
    try:
        transaction = with_room(make, step.ledger)
        if num_ranks() == 1:
            return StepRecovery(step, transaction)
        return _among_ranks(step, model, transaction)
    except RuntimeError as error:
        recovery = StepRecovery(step, None)
        failure = recovery.note(error)
        if failure is None:
            raise
    recovery.answer(failure)
    raise AssertionError("without a transaction no attempt is left")


def _among_ranks(
    step: RecoverableStep, model: nn.Module, transaction: StepTransaction
) -> StepRecovery:
    wrapper = find_wrapper(model)
    if wrapper is None:
        obstacle = sharding_obstacle(model)
        recovery = StepRecovery(step, transaction, obstacle=obstacle or _UNKNOWN_WRAPPER)
    else:
        parallel = DataParallelStep(wrapper, transaction)
        recovery = StepRecovery(step, transaction, data_parallel=parallel)
    if recovery.is_foreseen_to_stop():
        step.arm()
    return recovery

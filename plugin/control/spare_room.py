"""What a step may use, and where there is so much room that memory cannot run out. Pure.

A budget is what somebody wrote down; the capacity is what the device or the system says, limits of
the process and what other programs hold included. Plans obey both; for room to spare both must be
known.
"""

from __future__ import annotations

from rematic.control.step_plan import ROOMY_FACTOR, StepDecision

UPDATE_FACTOR = 8
"""Bytes that an update may take at most, over those of the parameters it changes.

AdamW over lists of tensors takes twice of them for what it computes and, in its first step, twice
of them for its state. Twice as much again is for `amsgrad`, for weights of 16 bits with a state of
32, and for what nobody has thought of.
"""


def usable_bytes(budget_bytes: int | None, capacity_bytes: int | None) -> int | None:
    """Returns the bytes that a step may use: the budget, or what the device has left of it.

    What is taken beside tensors while a run goes on (by the interpreter under a cap of the heap,
    by other programs on a device) makes the capacity less than a budget that once fitted.

    Args:
        budget_bytes: Bytes that may be in use; None if there is no limit to plan for.
        capacity_bytes: Bytes that could be in use, by what the device or the system says; None if
            not known.
    """
    if budget_bytes is None or capacity_bytes is None:
        return budget_bytes
    return min(budget_bytes, capacity_bytes)


def fits_update(
    *,
    in_use_bytes: int | None,
    parameter_bytes: int,
    budget_bytes: int | None,
    capacity_bytes: int | None,
    reserve: float,
) -> bool:
    """Returns whether an update has so much room that memory cannot run out in it.

    Args:
        in_use_bytes: Bytes in use when the last step ended; None if the probe cannot tell.
        parameter_bytes: Bytes of the parameters that it changes.
        budget_bytes: Bytes that may be in use; None if there is no limit to plan for.
        capacity_bytes: Bytes that could have been in use then, by what the device or the system
            says and not the recipe; None if not known.
        reserve: Share of the budget that stays free for what is not seen.
    """
    usable = usable_bytes(budget_bytes, capacity_bytes)
    if in_use_bytes is None or usable is None or capacity_bytes is None:
        return False
    limit_bytes = usable * (1 - reserve)
    return in_use_bytes + UPDATE_FACTOR * parameter_bytes <= limit_bytes


def has_spare_room(
    decision: StepDecision, *, in_use_bytes: int | None, capacity_bytes: int | None, reserve: float
) -> bool:
    """Returns whether a step has so much room that nothing needs to be ready to give way in it.

    Args:
        decision: What was decided for the step, from its budget.
        in_use_bytes: Bytes in use before it; None if the probe cannot tell.
        capacity_bytes: Bytes that could be in use, by what the device or the system says; None if
            not known.
        reserve: Share of the capacity that stays free for what is not seen.
    """
    peak = decision.predicted_peak_bytes
    if decision.limit_bytes is None or not decision.roomy:
        return False
    if peak is None or in_use_bytes is None or capacity_bytes is None:
        return False
    return in_use_bytes + ROOMY_FACTOR * (peak - in_use_bytes) <= capacity_bytes * (1 - reserve)

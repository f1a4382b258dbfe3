"""Whether an optimizer's step needs to be covered by the retry at the op. Pure."""

from __future__ import annotations

UPDATE_FACTOR = 8
"""Bytes that an update may take at most, over those of the parameters it changes.

AdamW over lists of tensors takes twice of them for what it computes and, in its first step, twice
of them for its state. Twice as much again is for `amsgrad`, for weights of 16 bits with a state of
32, and for what nobody has thought of.
"""


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
    if in_use_bytes is None or budget_bytes is None or capacity_bytes is None:
        return False
    limit_bytes = min(budget_bytes, capacity_bytes) * (1 - reserve)
    return in_use_bytes + UPDATE_FACTOR * parameter_bytes <= limit_bytes

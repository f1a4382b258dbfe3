"""When a step is planned by the model of its costs, and what becomes of the decision then. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rematic.control.step_plan import RISKY_SHARE, StepDecision, StepRequest
from rematic.policy import Action, Keep

if TYPE_CHECKING:  # control works without NumPy, which the planner needs
    from rematic.planner import Proposal


def is_pressed(decision: StepDecision, request: StepRequest) -> bool:
    """Returns whether a better plan than the measured one is worth looking for.

    It is not where nothing was measured yet, or where everything that may stay does.

    Args:
        decision: What was decided from measurements.
        request: What it was decided for.
    """
    if decision.limit_bytes is None or decision.predicted_peak_bytes is None:
        return False
    if any(decision.unmeasured):
        return False
    pairs = zip(request.actions, decision.plan.actions, strict=True)
    return any(given is None and not isinstance(chosen, Keep) for given, chosen in pairs)


def has_room_for_trace(
    decision: StepDecision, *, trace_bytes: int, capacity_bytes: int | None
) -> bool:
    """Returns whether a trace leaves the step the memory that it is expected to take.

    Args:
        decision: What was decided from measurements.
        trace_bytes: What a trace takes and does not give back.
        capacity_bytes: Bytes that could be in use at all where a trace takes them too; None if that
            is not known, or is other memory.
    """
    if capacity_bytes is None or decision.predicted_peak_bytes is None:
        return True
    return decision.predicted_peak_bytes + trace_bytes <= capacity_bytes


def room_bytes(decision: StepDecision, request: StepRequest) -> int:
    """Returns the bytes by which the step may rise above what is in use before it.

    Args:
        decision: What was decided from measurements.
        request: What it was decided for.
    """
    assert decision.limit_bytes is not None
    assert request.in_use_bytes is not None
    return decision.limit_bytes - request.in_use_bytes - decision.margin_bytes


def given_actions(request: StepRequest, pinned: Sequence[bool]) -> tuple[Action | None, ...]:
    """Returns what the planner must not change: rules, and units that are kept in any case."""
    pairs = zip(request.actions, pinned, strict=True)
    return tuple(Keep() if is_pinned else action for action, is_pinned in pairs)


def adopt(
    decision: StepDecision,
    request: StepRequest,
    proposal: Proposal,
    *,
    reserve_share: float,
    watched: bool,
    proven_bytes: int | None,
) -> StepDecision:
    """Returns the decision with the plan of the model in place of the measured one.

    What keeps a step safe stays: a step that comes near the budget is armed, until steps have come
    as near without a failure if it could run again as a whole; and one of a shape that was never
    measured is armed and watched.
    (The mode of the retry is not free: under it autograd adds gradients out of place.)

    Args:
        decision: What was decided from measurements.
        request: What it was decided for.
        proposal: The planner's plan.
        reserve_share: Share of the rise that was left free for errors of the model.
        watched: Whether memory is read after every op, to learn that error.
        proven_bytes: As many bytes in use as steps like this one have had without running out;
            None while that is not known.
    """
    assert request.in_use_bytes is not None
    peak = request.in_use_bytes + proposal.peak_bytes
    budget = request.budget_bytes or 0
    is_near = peak > RISKY_SHARE * budget
    if proven_bytes is not None and peak <= proven_bytes:
        is_near = False
    actions = proposal.plan.counts()
    return replace(
        decision,
        plan=proposal.plan,
        predicted_peak_bytes=peak,
        rise_after_bytes=proposal.rise_after_bytes,
        predicted_seconds=proposal.seconds,
        planned_by="model",
        armed=is_near or watched or decision.watched,
        watched=watched or decision.watched,
        roomy=False,
        reason=(
            f"the model's fastest plan ({', '.join(f'{n} {a}' for a, n in actions.items())}) rises "
            f"by {proposal.peak_bytes:,} bytes and takes {proposal.extra_seconds:.3g} s more than "
            f"keeping everything (limit {decision.limit_bytes:,}, in use {request.in_use_bytes:,}, "
            f"{reserve_share:.1%} of the rise in reserve)"
        ),
    )

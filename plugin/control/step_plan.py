"""The first controller: how many units may stay in memory in the step that comes.

Pure: it takes frozen values and returns frozen values (contract 10).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rematic.control.curve import Curve
from rematic.policy import Action, Keep, Plan, Recompute

RISKY_SHARE = 0.9
"""A step predicted to use more than this share of the budget is armed for retry at the op."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step needs, learned from the steps so far."""

    kept: tuple[tuple[str, Curve], ...] = ()
    """Bytes that one kept unit holds at the end of its forward, by class of unit."""

    forward_transient: Curve = field(default_factory=Curve)
    """Highest bytes in forward and loss beyond what was there before and what units keep."""

    backward_transient: Curve = field(default_factory=Curve)
    """The same in backward, beyond the gradients that have appeared."""

    margin_bytes: int = 0
    """Bytes by which plans fell short lately; they stay free on top of the reserve."""

    def kept_curve(self, unit_class: str) -> Curve:
        """Returns what is known of a class of units."""
        return dict(self.kept).get(unit_class, Curve())

    def transient_bytes(self, tokens: int) -> int | None:
        """Returns the working set beside kept units, None before the first watched step."""
        forward = self.forward_transient.at(tokens)
        backward = self.backward_transient.at(tokens)
        return None if forward is None or backward is None else max(forward, backward)


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What is known before a step."""

    tokens: int
    """Batch size x length."""

    unit_classes: tuple[str, ...]
    """Class of each unit, in order."""

    actions: tuple[Action | None, ...]
    """What the policy says of each unit; None leaves it to the plan."""

    in_use_bytes: int | None
    """Bytes in use before the step; None if the probe cannot tell."""

    pending_gradient_bytes: int
    """Gradients that do not exist yet and will after backward."""

    budget_bytes: int | None
    """Bytes that may be in use; None if there is no limit to plan for."""

    reserve: float
    """Share of the budget that stays free for what is not seen (fragmentation, workspaces)."""


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """What the step starts with, and why."""

    plan: Plan
    """Action of each unit."""

    predicted_peak_bytes: int | None
    """Highest bytes in use expected; None while nothing is known."""

    limit_bytes: int | None
    """Budget less the reserve."""

    later_kept_bytes: tuple[int, ...]
    """For each unit, what the units after it will keep, plus the working set."""

    armed: bool
    """Whether the retry at the op is in force."""

    watched: bool
    """Whether memory is read after every op, to learn the working set."""

    reason: str
    """The rule that decided, with its numbers."""


def plan_step(costs: Costs, request: StepRequest) -> StepDecision:
    """Decides which units start in memory: the last ones, as many as the budget allows.

    Memory is highest either when the loss is reached, with everything kept still there, or when
    backward ends, with every gradient there: max(in use + kept + working set, in use + gradients +
    working set). Between the two it is linear in the units done, so it is no higher.
    """
    limit = _limit_bytes(request)
    transient = costs.transient_bytes(request.tokens)
    sizes = [costs.kept_curve(name).at(request.tokens) for name in request.unit_classes]
    actions = _fixed(request.actions)
    reason = "every unit's action is given by the policy"
    if None in request.actions:
        chosen, reason = _choose(costs, request, limit, transient, sizes)
        actions = [a if a is not None else c for a, c in zip(request.actions, chosen, strict=True)]
    plan = Plan(actions=tuple(actions))
    peak = _predicted_peak(request, plan, sizes, transient)
    known = costs.forward_transient.covers(request.tokens)
    risky = limit is not None and (
        peak is None or not known or peak > RISKY_SHARE * (request.budget_bytes or 0)
    )
    return StepDecision(
        plan=plan,
        predicted_peak_bytes=peak,
        limit_bytes=limit,
        later_kept_bytes=_needed_after(plan, sizes, transient or 0),
        armed=risky,
        watched=limit is not None and not known,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a finished step measured."""

    tokens: int
    """Batch size x length."""

    kept_bytes: tuple[tuple[str, int], ...]
    """(class, bytes held at the end of forward) of the units that were held and measured."""

    forward_transient_bytes: int | None
    """Highest working set in forward and loss; None if the step was not watched."""

    backward_transient_bytes: int | None
    """Highest working set in backward; None if the step was not watched."""

    missing_bytes: int
    """Bytes by which a plan made from measured costs fell short, made up for by evicting."""


def learn(costs: Costs, outcome: StepOutcome) -> Costs:
    """Returns the costs with one more step taken into account."""
    kept = dict(costs.kept)
    for name, num_bytes in outcome.kept_bytes:
        kept[name] = kept.get(name, Curve()).updated(outcome.tokens, num_bytes)
    forward, backward = costs.forward_transient, costs.backward_transient
    if outcome.forward_transient_bytes is not None:
        forward = forward.updated(outcome.tokens, outcome.forward_transient_bytes)
    if outcome.backward_transient_bytes is not None:
        backward = backward.updated(outcome.tokens, outcome.backward_transient_bytes)
    # A shortfall raises the margin at once; without one it fades.
    margin = max(outcome.missing_bytes, costs.margin_bytes * 7 // 8)
    return replace(
        costs,
        kept=tuple(kept.items()),
        forward_transient=forward,
        backward_transient=backward,
        margin_bytes=margin,
    )


def _limit_bytes(request: StepRequest) -> int | None:
    if request.budget_bytes is None or request.in_use_bytes is None:
        return None
    return int(request.budget_bytes * (1 - request.reserve))


def _fixed(actions: tuple[Action | None, ...]) -> list[Action]:
    return [action if action is not None else Recompute() for action in actions]


def _choose(
    costs: Costs,
    request: StepRequest,
    limit: int | None,
    transient: int | None,
    sizes: list[int | None],
) -> tuple[list[Action], str]:
    heaviest: list[Action] = [Recompute() for _ in request.actions]
    if limit is None:
        return heaviest, "memory in use or the budget is unknown: the heaviest lossless policy"
    if transient is None:
        return heaviest, "nothing measured yet: the heaviest lossless policy"
    free = limit - (request.in_use_bytes or 0) - transient - costs.margin_bytes
    left = free - _kept_by_policy(request, sizes)
    chosen = heaviest
    for i in reversed(range(len(chosen))):
        if request.actions[i] is not None:
            continue
        size = sizes[i]
        if size is None or size > left:
            break
        left -= size
        chosen[i] = Keep()
    num_kept = sum(isinstance(action, Keep) for action in chosen)
    reason = (
        f"{num_kept} of {len(chosen)} units fit: {free:,} bytes are free beside the working set "
        f"of {transient:,} bytes (limit {limit:,}, in use {request.in_use_bytes:,}, "
        f"margin {costs.margin_bytes:,})"
    )
    return chosen, reason


def _kept_by_policy(request: StepRequest, sizes: list[int | None]) -> int:
    return sum(
        size or 0
        for action, size in zip(request.actions, sizes, strict=True)
        if isinstance(action, Keep)
    )


def _predicted_peak(
    request: StepRequest, plan: Plan, sizes: list[int | None], transient: int | None
) -> int | None:
    if transient is None or request.in_use_bytes is None:
        return None
    kept = 0
    for action, size in zip(plan.actions, sizes, strict=True):
        if isinstance(action, Keep):
            if size is None:
                return None
            kept += size
    return request.in_use_bytes + transient + max(kept, request.pending_gradient_bytes)


def _needed_after(plan: Plan, sizes: list[int | None], transient: int) -> tuple[int, ...]:
    needed, later = [], transient
    for action, size in zip(reversed(plan.actions), reversed(sizes), strict=True):
        needed.append(later)
        if isinstance(action, Keep):
            later += size or 0
    return tuple(reversed(needed))

"""The first controller: how many units may stay in memory in the step that comes.

Pure: it takes frozen values and returns frozen values (contract 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rematic.control.curve import Curve
from rematic.policy import Action, Keep, Plan, Recompute, Selective

RISKY_SHARE = 0.9
"""A step predicted to use more than this share of the budget is armed for retry at the op."""

ROOMY_FACTOR = 2
"""A step is roomy if so many times what it is expected to take would fit."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step needs, learned from the steps so far."""

    kept: tuple[tuple[str, Curve], ...] = ()
    """Bytes that one kept unit holds at the end of its forward, by class of unit."""

    unit_transient: Curve = field(default_factory=Curve)
    """Highest bytes inside a unit's forward beyond what was there before the step and what the
    units before it keep."""

    head_transient: Curve = field(default_factory=Curve)
    """The same outside the units: embedding, head and loss, with what every unit keeps."""

    backward_transient: Curve = field(default_factory=Curve)
    """The same in backward, beyond the gradients that have appeared and what the units before the
    one at work keep."""

    longest: int = 0
    """Tokens of the longest sequence whose step was watched."""

    margin_bytes: int = 0
    """Bytes by which plans fell short lately; they stay free on top of the reserve."""

    surprised: bool = False
    """Whether the last step used more than was predicted: the next one is looked at closely."""

    def kept_curve(self, unit_class: str) -> Curve:
        """Returns what is known of a class of units."""
        return dict(self.kept).get(unit_class, Curve())

    def cover(self, *, tokens: int, length: int) -> bool:
        """Returns whether a batch of nearly that shape was measured in forward and in backward.

        As many tokens in longer sequences need more: attention grows with the square of a length.
        """
        curves = (self.unit_transient, self.head_transient, self.backward_transient)
        return length <= 1.1 * self.longest and all(curve.covers(tokens) for curve in curves)

    def working_set(self, tokens: int) -> WorkingSet | None:
        """Returns what a step needs beside kept units, None before the first watched one."""
        inside = self.unit_transient.at(tokens)
        head = self.head_transient.at(tokens)
        backward = self.backward_transient.at(tokens)
        if inside is None or head is None or backward is None:
            return None
        return WorkingSet(unit_bytes=max(inside, backward), head_bytes=head, last_bytes=backward)


@dataclass(frozen=True, kw_only=True)
class WorkingSet:
    """Bytes that come and go during a step, beside what units keep."""

    unit_bytes: int
    """Forward or backward of one unit, what that unit keeps included."""

    head_bytes: int
    """Head and loss."""

    last_bytes: int
    """Backward of one unit, which the last one finds with every gradient there."""

    def beside(self, kept: Sequence[int]) -> int:
        """Returns the highest bytes while the units that keep `kept` are all there.

        Memory is highest when the last unit is at work, which then does not keep yet, or when the
        loss is reached.
        """
        return self.beside_total(sum(kept), last=kept[-1] if kept else 0)

    def beside_total(self, total: int, *, last: int) -> int:
        """Returns the same from the bytes that all keep and those of the last one among them."""
        return max(total - last + self.unit_bytes, total + self.head_bytes)


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What is known before a step."""

    tokens: int
    """Batch size x length."""

    length: int
    """Tokens of each sequence."""

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

    repeatable: bool = False
    """Whether the step can run again as a whole, should memory run out in it."""

    hole_bytes: int | None = None
    """Bytes that the allocator holds in pieces before the step; None if the probe cannot tell."""


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """What the step starts with, and why."""

    plan: Plan
    """Action of each unit."""

    predicted_peak_bytes: int | None
    """Highest bytes in use expected; None while nothing is known."""

    limit_bytes: int | None
    """Budget less the reserve."""

    unmeasured: tuple[bool, ...]
    """For each unit, whether the plan would like to know what it keeps and nobody has seen it."""

    needed_after_bytes: tuple[int, ...]
    """For each unit, the most that the rest of the step needs when its forward has ended, beside
    what was in use before the step and what the units so far keep."""

    armed: bool
    """Whether the retry at the op is in force."""

    watched: bool
    """Whether memory is read after every op, to learn the working set."""

    roomy: bool
    """Whether far more than the step is expected to take would fit: memory is then read when
    backward begins only, and not after each unit."""

    reason: str
    """The rule that decided, with its numbers."""

    margin_bytes: int = 0
    """Bytes that stay free since plans fell short lately."""

    planned_by: Literal["measurements", "model"] = "measurements"
    """What the plan was made from."""

    rise_after_bytes: tuple[int, ...] | None = None
    """For each unit, how far the rest of the step rises above what is in use when its forward has
    ended; None where the plan was made from measurements."""

    predicted_seconds: float | None = None
    """Time of forward and backward; None where the plan was made from measurements."""

    keep_seconds: float | None = None
    """Time of forward and backward with everything kept; None where no model of the step knows."""


def plan_step(costs: Costs, request: StepRequest) -> StepDecision:
    """Decides which units start in memory: the last ones, as many as the budget allows.

    Memory is highest when the last unit is at work, when the loss is reached, or when backward
    ends with every gradient there. In between it is linear in the units done, so it is no higher.
    """
    limit = _limit_bytes(request)
    working = costs.working_set(request.tokens)
    chosen, reason = _choose(costs, request, limit, working)
    actions = [a if a is not None else c for a, c in zip(request.actions, chosen, strict=True)]
    plan = Plan(actions=tuple(actions))
    peak = _predicted_peak(costs, request, plan, working)
    known = costs.cover(tokens=request.tokens, length=request.length)
    risky = limit is not None and (
        peak is None or not known or peak > RISKY_SHARE * (request.budget_bytes or 0)
    )
    return StepDecision(
        plan=plan,
        predicted_peak_bytes=peak,
        limit_bytes=limit,
        unmeasured=_unmeasured(costs, request),
        needed_after_bytes=_needed_after(costs, request, plan, working),
        armed=risky,
        watched=limit is not None and not known,
        roomy=limit is None or (known and _is_roomy(costs, request, plan, peak, limit)),
        reason=reason,
        margin_bytes=costs.margin_bytes,
    )


def _is_roomy(
    costs: Costs, request: StepRequest, plan: Plan, peak: int | None, limit_bytes: int
) -> bool:
    """Returns whether there is room to spare, and what each class keeps at this length is known."""
    if peak is None or request.in_use_bytes is None or costs.surprised:
        return False
    pairs = zip(request.unit_classes, plan.actions, strict=True)
    keys = {kept_key(name, a.name) for name, a in pairs if isinstance(a, (Keep, Selective))}
    expected = peak - request.in_use_bytes
    return request.in_use_bytes + ROOMY_FACTOR * expected <= limit_bytes and all(
        costs.kept_curve(key).measured(request.tokens) for key in keys
    )


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a finished step measured."""

    tokens: int
    """Batch size x length."""

    length: int
    """Tokens of each sequence."""

    kept_bytes: tuple[tuple[str, int], ...]
    """(`kept_key`, bytes held at the end of forward) of the units that held something."""

    unit_transient_bytes: int | None
    """Highest working set inside a unit's forward; None if the step was not watched."""

    head_transient_bytes: int | None
    """Highest working set of embedding, head and loss; None if the step was not watched."""

    backward_transient_bytes: int | None
    """Highest working set in backward; None if the step was not watched."""

    missing_bytes: int
    """Bytes by which a plan made from measured costs fell short, made up for by evicting."""

    surprising: bool = False
    """Whether the step used more than was predicted for it."""


def learn(costs: Costs, outcome: StepOutcome) -> Costs:
    """Returns the costs with one more step taken into account."""
    kept = dict(costs.kept)
    for name, num_bytes in outcome.kept_bytes:
        kept[name] = kept.get(name, Curve()).updated(outcome.tokens, num_bytes)
    tokens = outcome.tokens
    # A shortfall raises the margin at once; without one it fades.
    margin = max(outcome.missing_bytes, costs.margin_bytes * 7 // 8)
    watched = outcome.head_transient_bytes is not None
    return replace(
        costs,
        kept=tuple(kept.items()),
        unit_transient=_updated(costs.unit_transient, tokens, outcome.unit_transient_bytes),
        head_transient=_updated(costs.head_transient, tokens, outcome.head_transient_bytes),
        backward_transient=_updated(
            costs.backward_transient, tokens, outcome.backward_transient_bytes
        ),
        longest=max(costs.longest, outcome.length) if watched else costs.longest,
        margin_bytes=margin,
        surprised=outcome.surprising,
    )


def _limit_bytes(request: StepRequest) -> int | None:
    if request.budget_bytes is None or request.in_use_bytes is None:
        return None
    return int(request.budget_bytes * (1 - request.reserve))


def _updated(curve: Curve, tokens: int, num_bytes: int | None) -> Curve:
    return curve if num_bytes is None else curve.updated(tokens, num_bytes)


def _choose(
    costs: Costs, request: StepRequest, limit: int | None, working: WorkingSet | None
) -> tuple[list[Action], str]:
    """Returns the actions that the plan would choose, and why it chooses them."""
    recomputed: list[Action] = [Recompute() for _ in request.actions]
    if None not in request.actions:
        return recomputed, "every unit's action is given by the policy"
    if limit is None or request.in_use_bytes is None:
        return recomputed, "memory in use or the budget is unknown: the units are recomputed"
    if working is None:
        return recomputed, "nothing measured yet: the units are recomputed"
    free = limit - request.in_use_bytes - costs.margin_bytes
    chosen = _keep_from_the_last(costs, request, working, free)
    num_kept = sum(isinstance(action, Keep) for action in chosen)
    return chosen, (
        f"{num_kept} of {len(chosen)} units fit into {free:,} bytes (limit {limit:,}, in use "
        f"{request.in_use_bytes:,}, margin {costs.margin_bytes:,}) beside a unit at work "
        f"({working.unit_bytes:,}) and the head ({working.head_bytes:,})"
    )


def _keep_from_the_last(
    costs: Costs, request: StepRequest, working: WorkingSet, free_bytes: int
) -> list[Action]:
    """Keeps units from the last one on while everything kept fits into `free_bytes`.

    Units of a class that has never been seen to run are passed over: they may never do.
    """
    unmeasured = _unmeasured(costs, request)
    sizes = _kept(costs, request, [Keep() if a is None else a for a in request.actions])
    kept = [0 if a is None else size or 0 for a, size in zip(request.actions, sizes, strict=True)]
    chosen: list[Action] = [Recompute() for _ in request.actions]
    total = sum(kept)
    for i in reversed(range(len(chosen))):
        if request.actions[i] is not None or unmeasured[i]:
            continue
        kept[i] = sizes[i] or 0
        total += kept[i]
        if working.beside_total(total, last=kept[-1]) > free_bytes:
            break
        chosen[i] = Keep()
    return chosen


def _unmeasured(costs: Costs, request: StepRequest) -> tuple[bool, ...]:
    known = {name for name, curve in costs.kept if curve.points}
    pairs = zip(request.unit_classes, request.actions, strict=True)
    return tuple(action is None and unit_class not in known for unit_class, action in pairs)


def kept_key(unit_class: str, action_name: str) -> str:
    """Returns the name under which the bytes of a class of units under an action are learned."""
    return unit_class if action_name == Keep.name else f"{unit_class} {action_name}"


def _kept(costs: Costs, request: StepRequest, actions: Sequence[Action]) -> list[int | None]:
    """Returns what each unit keeps, None where that was never measured."""
    sizes: dict[str, int | None] = {}
    kept: list[int | None] = []
    for unit_class, action in zip(request.unit_classes, actions, strict=True):
        key = kept_key(unit_class, action.name)
        if key not in sizes:
            sizes[key] = costs.kept_curve(key).at(request.tokens)
        kept.append(sizes[key] if isinstance(action, (Keep, Selective)) else 0)
    return kept


def _predicted_peak(
    costs: Costs, request: StepRequest, plan: Plan, working: WorkingSet | None
) -> int | None:
    kept = _kept(costs, request, plan.actions)
    if working is None or None in kept or request.in_use_bytes is None:
        return None
    at_the_end = request.pending_gradient_bytes + working.last_bytes
    beside = working.beside([size or 0 for size in kept])
    return request.in_use_bytes + max(beside, at_the_end)


def _needed_after(
    costs: Costs, request: StepRequest, plan: Plan, working: WorkingSet | None
) -> tuple[int, ...]:
    if working is None:
        return (0,) * len(plan.actions)
    kept = [size or 0 for size in _kept(costs, request, plan.actions)]
    needed, total = [0] * len(kept), sum(kept)
    for i, size in enumerate(kept):
        total -= size
        needed[i] = working.beside_total(total, last=kept[-1])
    # after the last unit comes the head, and then its own backward, which finds what it kept
    needed[-1] = max(working.head_bytes, working.unit_bytes - kept[-1])
    return tuple(needed)

"""Decides everything again from the journal of a run (contract 10). Pure.

What a decision took as input is in the journal: `control` has the state that the controller
starts with, each `step` its figures and what was learned from it, each change its policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rematic.control.comparison import comparison_due
from rematic.control.controller import decide
from rematic.control.controller_plain import (
    controller_from_plain,
    decision_to_plain,
    rules_from_plain,
)
from rematic.control.controller_state import ControllerState, Decision, is_news
from rematic.control.damaged import DamageNamed, ends_what_is_known
from rematic.control.goals import ControlRules
from rematic.control.observation import observe
from rematic.control.plain import costs_from_plain, outcome_from_plain
from rematic.control.policy_trail import CHANGES
from rematic.control.spare_room import usable_bytes
from rematic.control.step_plan import Costs, StepDecision, StepRequest, learn, plan_step
from rematic.policy import Action, policy_from_plain, resolve

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """One step, decided again."""

    event: Event
    """The step as it is in the journal."""

    costs: Costs
    """What was known before it."""

    request: StepRequest
    """What its plan was made for."""

    plan: StepDecision
    """Its plan, made again."""

    was_retried: bool
    """Whether the micro-batch ran again as a whole, under another plan than the first."""

    by_model: bool
    """Whether the planner made its plan from a trace of the model, which is not in the journal."""

    before: ControllerState
    """The controller's state before it was seen."""

    decision: Decision
    """What followed from it, decided again."""

    written: Mapping[str, Any] | None
    """The `decision` event that should follow; None where nothing was worth a line."""

    compared: Mapping[str, str] | None
    """Under which policy the batch was to be run too, and why, if its host could; None for none."""


@dataclass
class _Replay:
    """What has been read of one process of a run."""

    rules: ControlRules
    state: ControllerState
    costs: Costs
    classes: Mapping[str, str]
    reserve: float
    actions: tuple[Action | None, ...]
    next_step: int | None
    retried: set[int] = field(default_factory=set)

    def request(self, event: Event) -> StepRequest:
        return StepRequest(
            tokens=event["tokens"],
            length=event["length"],
            unit_classes=tuple(self.classes.values()),
            actions=self.actions,
            in_use_bytes=event["before"]["allocated_bytes"],
            pending_gradient_bytes=event["pending_gradient_bytes"] or 0,
            budget_bytes=usable_bytes(event["budget_bytes"], event["before"]["capacity_bytes"]),
            reserve=self.reserve,
        )

    def take(self, event: Event) -> ReplayedStep | None:
        kind = event["event"]
        if kind == "compare" or (kind == "retry" and event["level"] == "step"):
            self.retried.add(event["step"])
        elif kind in CHANGES:
            self.actions = resolve(policy_from_plain(event["policy"]), self.classes)
        elif kind == "step":
            return self.step(event)
        return None

    def step(self, event: Event) -> ReplayedStep:
        request, costs, before = self.request(event), self.costs, self.state
        self.state, decision = decide(before, observe(event), self.rules)
        self.costs = learn(costs, outcome_from_plain(event))
        self.next_step = event["step"] + 1
        was_retried = event["step"] in self.retried or event.get("comparison") is not None
        self.retried.clear()
        due = comparison_due(
            before.trial, self.rules.goals, policy=event["policy"], tokens=event["tokens"]
        )
        return ReplayedStep(
            event=event,
            costs=costs,
            request=request,
            plan=plan_step(costs, request),
            was_retried=was_retried,
            by_model=event.get("planned_by") == "model",
            before=before,
            decision=decision,
            written=decision_to_plain(decision) if is_news(before, decision) else None,
            compared=None if due is None else due._asdict(),
        )


class Replay:
    """Decides every step of a journal again, event by event.

    Steps before the first `control` event are left out; so are those between missing events and
    the next `control` event, whose state nobody knows.
    """

    def __init__(self) -> None:
        self._now: _Replay | None = None

    def take(self, event: Event) -> ReplayedStep | None:
        """Takes the next event; returns the step that it is, decided again, if it can be.

        Raises:
            DamagedEventError: If the event is not what rematic writes.
        """
        with DamageNamed(event):
            kind = event["event"]
            if ends_what_is_known(event):
                self._now = None
            elif kind == "control":
                self._now = _begun(event)
            elif self._now is not None:
                if kind == "step" and self._now.next_step not in (None, event["step"]):
                    self._now = None
                    return None
                return self._now.take(event)
        return None


def replay(events: Iterable[Event]) -> Iterator[ReplayedStep]:
    """Yields every step of a journal that `Replay` can decide again.

    Args:
        events: The events in the order in which they were written.

    Raises:
        DamagedEventError: If an event is not what rematic writes.
    """
    again = Replay()
    for event in events:
        step = again.take(event)
        if step is not None:
            yield step


def _begun(event: Event) -> _Replay:
    return _Replay(
        rules=rules_from_plain(event["rules"]),
        state=controller_from_plain(event["state"]),
        costs=costs_from_plain(event["costs"]),
        classes=event["classes"],
        reserve=event["reserve"],
        actions=resolve(policy_from_plain(event["policy"]), event["classes"]),
        next_step=event.get("step"),
    )

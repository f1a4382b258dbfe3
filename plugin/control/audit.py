"""Compares a journal with what its own figures decide. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rematic.control.policy_trail import mismatches
from rematic.control.replay import Event, ReplayedStep, replay


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A decision that the figures in the journal do not lead to."""

    step: int
    """The step."""

    field: str
    """What differs."""

    written: object
    """What the journal says."""

    decided: object
    """What was decided again."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    num_steps: int
    """Steps that were decided again."""

    num_unaudited: int
    """Steps that could not be: written before there was a controller, or behind missing lines."""

    num_retried: int
    """Steps whose plan was not compared, since they ran again under another."""

    num_modelled: int
    """Steps whose plan was not compared, since the planner made it from a trace of the model, which
    is not in the journal."""

    num_decisions: int
    """Decisions of the controller in the journal."""

    differences: tuple[Difference, ...]
    """Everything that differs."""


def audit(events: Iterable[Event]) -> AuditReport:
    """Decides everything again, and returns every difference.

    Args:
        events: The events in the order in which they were written.

    Raises:
        DamagedEventError: If an event is not what rematic writes.
    """
    written = list(events)
    steps = list(replay(written))
    following = _following(written)
    found = [
        difference
        for step in steps
        for difference in (
            *_plan_differences(step),
            *_comparison_differences(step),
            *_decision_differences(step, following),
        )
    ]
    found += [
        Difference(step=event["step"], field="decision", written=event.get("rule"), decided=None)
        for event in _of_no_step(written)
    ]
    found += [
        Difference(step=one.step, field=one.field, written=one.written, decided=one.followed)
        for one in mismatches(written)
    ]
    return AuditReport(
        num_steps=len(steps),
        num_unaudited=sum(event["event"] == "step" for event in written) - len(steps),
        num_retried=sum(step.was_retried for step in steps),
        num_modelled=sum(step.by_model for step in steps),
        num_decisions=sum(event["event"] == "decision" for event in written),
        differences=tuple(found),
    )


def _following(events: Sequence[Event]) -> dict[int, Event]:
    """Returns the decision right behind each step event, by the identity of the step event."""
    return {id(one): two for one, two in _pairs(events) if one["event"] == "step"}


def _of_no_step(events: Sequence[Event]) -> list[Event]:
    """Returns the decisions that are not right behind a step."""
    return [two for one, two in _pairs(events) if one["event"] != "step"]


def _pairs(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yields every decision behind the step, decision or `control` before it."""
    own = (event for event in events if event["event"] in ("control", "step", "decision"))
    return ((one, two) for one, two in itertools.pairwise(own) if two["event"] == "decision")


def _plan_differences(step: ReplayedStep) -> Iterator[Difference]:
    if step.was_retried or step.by_model:
        return
    plan = step.plan
    decided = {
        "plan": plan.plan.counts(),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "reason": plan.reason,
    }
    for field, value in decided.items():
        if step.event.get(field) != value:
            yield _difference(step, field, step.event.get(field), value)


def _comparison_differences(step: ReplayedStep) -> Iterator[Difference]:
    """Compares under which policy a batch was run too; what its host can do, the journal says."""
    if "comparison" not in step.event:
        return
    said = step.event["comparison"]
    written = said and {name: said.get(name) for name in ("policy", "rule")}
    if written != step.compared:
        yield _difference(step, "comparison", written, step.compared)


def _decision_differences(step: ReplayedStep, following: dict[int, Event]) -> Iterator[Difference]:
    written = following.pop(id(step.event), None)
    if written is None or step.written is None:
        if written is not None or step.written is not None:
            yield _difference(step, "decision", written and written.get("rule"), _rule(step))
        return
    for field, value in {"step": step.event["step"], **step.written}.items():
        if written.get(field) != value:
            yield _difference(step, f"decision.{field}", written.get(field), value)


def _rule(step: ReplayedStep) -> object:
    return None if step.written is None else step.written["rule"]


def _difference(step: ReplayedStep, field: str, written: object, decided: object) -> Difference:
    return Difference(step=step.event["step"], field=field, written=written, decided=decided)

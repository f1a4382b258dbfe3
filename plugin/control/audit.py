"""Compares a journal with what its own figures decide. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """Steps that could not be: written before there was a controller."""

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
    """
    written = list(events)
    steps = list(replay(written))
    following = _following(written)
    found = [
        difference
        for step in steps
        for difference in (*_plan_differences(step), *_decision_differences(step, following))
    ]
    found += [  # decisions that no step accounts for
        Difference(step=event["step"], field="decision", written=event["rule"], decided=None)
        for event in following.values()
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
    own = [event for event in events if event["event"] in ("step", "decision")]
    pairs = itertools.pairwise(own)
    return {id(one): two for one, two in pairs if (one["event"], two["event"]) == _IN_ORDER}


_IN_ORDER = ("step", "decision")


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
        if step.event[field] != value:
            yield _difference(step, field, step.event[field], value)


def _decision_differences(step: ReplayedStep, following: dict[int, Event]) -> Iterator[Difference]:
    written = following.pop(id(step.event), None)
    if written is None or step.written is None:
        if written is not None or step.written is not None:
            yield _difference(step, "decision", written and written["rule"], _rule(step))
        return
    for field, value in step.written.items():
        if written[field] != value:
            yield _difference(step, f"decision.{field}", written[field], value)


def _rule(step: ReplayedStep) -> object:
    return None if step.written is None else step.written["rule"]


def _difference(step: ReplayedStep, field: str, written: object, decided: object) -> Difference:
    return Difference(step=step.event["step"], field=field, written=written, decided=decided)

"""Compares a journal with what its own figures decide. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rematic.control.policy_trail import PolicyTrail
from rematic.control.replay import Event, Replay, ReplayedStep


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
        events: The events in the order in which they were written; they are taken one by one, and
            none is kept.

    Raises:
        DamagedEventError: If an event is not what rematic writes.
    """
    tally = _Tally()
    for event in events:
        tally.take(event)
    tally.end()
    return AuditReport(
        num_steps=tally.num_steps,
        num_unaudited=tally.counts["step"] - tally.num_steps,
        num_retried=tally.num_retried,
        num_modelled=tally.num_modelled,
        num_decisions=tally.counts["decision"],
        differences=tuple(tally.found),
    )


class _Tally:
    """What has been audited so far."""

    def __init__(self) -> None:
        self.found: list[Difference] = []
        self.counts: Counter[str] = Counter()
        self.num_steps = self.num_retried = self.num_modelled = 0
        self._replay, self._trail = Replay(), PolicyTrail()
        self._last: ReplayedStep | None = None
        """The step whose decision, if there is one, comes next."""
        self._last_kind: str | None = None

    def take(self, event: Event) -> None:
        self.found += [
            Difference(step=one.step, field=one.field, written=one.written, decided=one.followed)
            for one in self._trail.take(event)
        ]
        step, kind = self._replay.take(event), event["event"]
        if kind not in ("attach", "control", "step", "decision"):
            return
        self.counts[kind] += 1
        if kind == "decision":
            self._decided(event)
        else:
            self.end()
        self._last_kind = kind
        if step is not None:
            self._stepped(step)

    def end(self) -> None:
        """Ends a step that no decision follows."""
        last, self._last = self._last, None
        if last is not None and last.written is not None:
            self.found.append(_difference(last, "decision", None, last.written["rule"]))

    def _stepped(self, step: ReplayedStep) -> None:
        self._last = step
        self.num_steps += 1
        self.num_retried += step.was_retried
        self.num_modelled += step.by_model
        self.found += (*_plan_differences(step), *_comparison_differences(step))

    def _decided(self, event: Event) -> None:
        last, self._last = self._last, None
        if last is not None:
            self.found += _decision_differences(last, event)
        elif self._last_kind != "step":  # else the step could not be audited either
            rule = event.get("rule")
            self.found.append(
                Difference(step=event["step"], field="decision", written=rule, decided=None)
            )


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


def _decision_differences(step: ReplayedStep, written: Event) -> Iterator[Difference]:
    if step.written is None:
        yield _difference(step, "decision", written.get("rule"), None)
        return
    for field, value in {"step": step.event["step"], **step.written}.items():
        if written.get(field) != value:
            yield _difference(step, f"decision.{field}", written.get(field), value)


def _difference(step: ReplayedStep, field: str, written: object, decided: object) -> Difference:
    return Difference(step=step.event["step"], field=field, written=written, decided=decided)

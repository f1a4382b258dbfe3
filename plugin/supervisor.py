"""Lets the controller see every step of a session, and does what it decides."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rematic import control
from rematic.at_stop import save_before_stop
from rematic.control import (
    Change,
    Comparison,
    ComparisonOutcome,
    ControllerState,
    ControlRules,
    Decision,
    StopReport,
)
from rematic.memory import RELEASING_KINDS, allocator_settings, release_cached_blocks
from rematic.operator_requests import RequestReader
from rematic.policy import LADDER, Policy, policy_named, policy_to_plain

if TYPE_CHECKING:
    from rematic.session import Session

_log = logging.getLogger("rematic")

_COMPARED = ("loss", "gradient")
"""Gates that need a batch that has run under both policies."""

LADDER_NAMES = tuple(policy.name for policy in LADDER)


class RunStoppedError(RuntimeError):
    """A run that a person must decide about; it was stopped between two steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a session is supervised."""

    rules: ControlRules = dataclasses.field(
        default_factory=lambda: ControlRules(ladder=LADDER_NAMES)
    )
    """What the controller keeps to."""

    escalation: Literal["warn", "checkpoint_and_stop", "call"] = "warn"
    """What happens when a person must decide."""

    on_escalation: Callable[[str], None] | None = None
    """Called with the question where `escalation` is `call`."""

    requests: RequestReader | None = None
    """Where an operator's requests come from; None for nowhere."""

    begins_with: Policy | None = None
    """A policy that follows after the first step, on probation; None for none."""

    def __post_init__(self) -> None:
        if (self.escalation == "call") != (self.on_escalation is not None):
            given = "no function" if self.on_escalation is None else "a function"
            raise ValueError(
                f"control.escalation is {self.escalation!r} and there is {given} to call: expected "
                "`escalation: call` in the recipe together with `on_escalation=...` in "
                "`rematic.attach`, or neither."
            )


class Supervisor:
    """Journals verdicts and decisions; asks the session for the changes, at boundaries only.

    Args:
        session: The session, whose public methods it uses.
        supervision: What it keeps to.
    """

    def __init__(self, session: Session, supervision: Supervision) -> None:
        self.armed = False
        """Whether the next step is armed, since the last ones were troubled."""
        self.state = ControllerState()
        """What the controller remembers."""
        self._comparison: dict[str, Any] = {}
        self._begins_with = supervision.begins_with
        self._session = session
        self._supervision = supervision
        self._rules: ControlRules | None = None
        self._releases = False
        self._advised = False
        self._stop_because: str | None = None
        self._is_polling = False
        self._num_gaps = 0
        self._limit_bytes: int | None = None

    def before_step(self) -> None:
        """Writes what it keeps to, once; stops a run that a person must decide about.

        (Not between the micro-batches of an update, whose gradients would be lost.)

        Raises:
            RunStoppedError: If `escalation` is `checkpoint_and_stop` and a person must decide.
        """
        if self._stop_because is not None and self._session.begins_window:
            self._stop(self._stop_because)
        num_gaps = self._session.settings.journal.num_gaps
        if self._rules is None or num_gaps != self._num_gaps:  # an audit goes on from here
            self._num_gaps = num_gaps
            self._begin()
        self._comparison = {}  # of a step that was given up

    def after_step(self, event: Mapping[str, Any]) -> None:
        """Decides after a step, from its event in the journal."""
        assert self._rules is not None
        before, seen = self.state, control.observe(event)
        self._limit_bytes = seen.limit_bytes
        self.state, decision = control.decide(before, seen, self._rules)
        self.armed = decision.armed
        if control.is_news(before, decision):
            plain = control.decision_to_plain(decision)
            self._write({"event": "decision", "step": event["step"], **plain})
            self._do(decision)
        policy, self._begins_with = self._begins_with, None
        if policy is not None:
            reason = "what the run is to begin with, on probation"
            self._ask(Change(kind="switch", policy=policy, reason=reason))

    def begin_comparison(self, *, tokens: int) -> Comparison | None:
        """Returns under which policy the batch of the open step is to be run first, if any.

        To be asked where a batch can be run twice; the event of the step says what came of it.

        Args:
            tokens: Of the batch.
        """
        assert self._rules is not None
        due = control.comparison_due(
            self.state.trial,
            self._rules.goals,
            policy=self._session.history.current.name,
            tokens=tokens,
        )
        self._comparison = {"comparison": None if due is None else due._asdict()}
        self.note_comparison("not compared")  # until it has ended
        return due

    def note_comparison(self, outcome: ComparisonOutcome) -> None:
        """Takes note of what has come of the two runs so far."""
        if self._comparison.get("comparison") is not None:
            self._comparison["comparison"]["outcome"] = outcome

    def end_comparison(self, found: Mapping[str, float]) -> None:
        """Takes how far the two runs of a batch are apart.

        Args:
            found: `loss_difference` and `gradient_difference`, as the step's event has them.
        """
        self.note_comparison("compared")
        self._comparison.update(found)

    def take_comparison(self) -> dict[str, Any]:
        """Returns what the event of the step that ends says of it, once."""
        comparison, self._comparison = self._comparison, {}
        return comparison

    def at_boundary(self) -> None:
        """Releases what was decided to be released, and answers an operator."""
        if self._releases:
            self._releases = False
            self._release()
        requests = self._supervision.requests
        if requests is not None and not self._is_polling:
            self._is_polling = True
            try:
                for request in requests.poll():
                    self._write({"event": "request", **request.answered_by(self._session)})
            finally:
                self._is_polling = False

    def objection(self, change: Change) -> str | None:
        """Returns why this rank does not follow the controller of another, None if it does."""
        if not change.by_controller or change.kind != "switch" or change.policy is None:
            return None
        return control.need_of(self.state, change.policy.name, self._limit_bytes)

    def after_agreement(self, change: Change) -> None:
        """Takes over what the controller of another rank has found out about a policy."""
        after = control.with_rejected(self.state, change.rejected)
        if after.quarantine != self.state.quarantine:
            self.state = after
            self._begin()  # an audit goes on from the new state

    def take_up(self, state: ControllerState, *, begins: bool) -> None:
        """Goes on from the state of an earlier session.

        Args:
            state: What its controller remembered.
            begins: Whether what the run was to begin with still comes after the first step.
        """
        self.state = state
        self._rules = None
        if not begins:
            self._begins_with = None

    def _begin(self) -> None:
        rules = dataclasses.replace(
            self._supervision.rules, can_release=self._session.probe.kind in RELEASING_KINDS
        )
        if rules.adapt and not self._session.can_change:
            rules = dataclasses.replace(rules, adapt=False)
        self._rules = rules
        self._write(
            {
                "event": "control",
                "escalation": self._supervision.escalation,
                "rules": control.rules_to_plain(rules),
                "state": control.controller_to_plain(self.state),
                **self._basis(),
            }
        )

    def _do(self, decision: Decision) -> None:
        self._releases = self._releases or decision.release
        reason = _reason(decision)
        if decision.change != "none":
            refused = self._ask(self._change(decision, reason))
            if refused is None:
                _log.warning("policy %s follows: %s", decision.policy, reason)
            else:
                _log.warning("policy %s does not follow: %s", decision.policy, refused)
        if decision.person:
            self._ask_person(decision.person)
        for gate in decision.gates:
            if gate.name in _COMPARED and gate.bound is not None and gate.passed is None:
                _log.warning(
                    "the gate %r was not judged: no batch of the probation ran under both "
                    "policies. That takes one process, and a step that can be repeated "
                    "(`session.run`, `@plugin.step`, automatic optimization in Lightning).",
                    gate.name,
                )

    def _ask(self, change: Change) -> str | None:
        """Asks the session for a change; returns why it is refused, None if it is not."""
        try:
            self._session.ask(change)
        except ValueError as error:
            self._write({"event": "refused", "change": change.kind, "reason": str(error)})
            return str(error)
        return None

    def _change(self, decision: Decision, reason: str) -> Change:
        if decision.change == "rollback":
            return Change(
                kind="rollback",
                reason=reason,
                steps=control.switches_since(self._session.history, decision.policy),
                by_controller=True,
                rejected=control.rejected_by(self.state, self._session.policy.name),
            )
        policy = self._policy(decision.policy)
        return Change(kind="switch", policy=policy, reason=reason, by_controller=True)

    def _policy(self, name: str) -> Policy:
        """Returns the policy of that name, with the rules of those that were in force."""
        history = self._session.history
        known = control.policy_in_history(history, name)
        return known or dataclasses.replace(policy_named(name), rules=history.current.rules)

    def _ask_person(self, question: str) -> None:
        if self._supervision.escalation == "checkpoint_and_stop":
            self._stop_because = question
        elif self._supervision.on_escalation is not None:
            self._supervision.on_escalation(question)
        else:
            _log.warning("%s", question)

    def _stop(self, question: str) -> None:
        """Saves the training between two steps, and stops it."""
        self._stop_because = None
        report = self._report(question)
        try:
            report = save_before_stop(self._session, report)
        finally:  # an interrupt while it is saved as well
            self._write(
                {"event": "stop", "reason": "a person must decide", "report": question}
                | {"batch": None, "length": None}
                | {"checkpoint": report.checkpoint, "not_saved": report.not_saved}
            )
        where = "Nothing was there to save it."
        if report.checkpoint:
            where = f"It was saved to {report.checkpoint}."
        elif report.not_saved:
            where = f"It could not be saved ({report.not_saved})."
        raise RunStoppedError(f"the training was stopped: {question} {where}")

    def _report(self, question: str) -> StopReport:
        return StopReport(
            batch=None,
            length=None,
            budget_bytes=self._session.budget_bytes,
            attempts=(),
            obstacle=question,
            largest_length=None,
            resident_bytes=(),
        )

    def _basis(self) -> dict[str, Any]:
        """Returns what plans are decided from beside each step's own figures, in plain types."""
        return {
            "policy": policy_to_plain(self._session.policy),
            "classes": dict(self._session.unit_classes),
            "reserve": self._session.settings.reserve,
            "costs": control.costs_to_plain(self._session.costs),
        }

    def _release(self) -> None:
        freed = release_cached_blocks(self._session.probe)
        self._write({"event": "release", "bytes_freed": freed})
        expandable = allocator_settings().get("expandable_segments", "").lower() == "true"
        if not self._advised and not expandable and self._session.probe.kind == "cuda":
            self._advised = True
            _log.warning(
                "memory is in pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True for the next "
                "run, which keeps holes from forming"
            )

    def _write(self, event: Mapping[str, object]) -> None:
        step = self._session.num_steps
        self._session.settings.journal.write({**event, "step": event.get("step", step)})


def _reason(decision: Decision) -> str:
    numbers = [f"{name} {value:,}" for name, value in decision.evidence]
    numbers += [
        f"{gate.name} {gate.measured:.4g} {gate.unit}, bound {gate.bound:.4g}"
        for gate in decision.gates
        if gate.passed is False and gate.measured is not None and gate.bound is not None
    ]
    return f"{decision.rule} ({', '.join(numbers)})" if numbers else decision.rule

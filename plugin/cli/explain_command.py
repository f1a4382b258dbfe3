"""`rematic explain RUN --step N`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rematic import control
from rematic.byte_sizes import format_bytes
from rematic.cli.exit_codes import DONE
from rematic.cli.run_events import events_of_run, naming_damage
from rematic.control import Alternative, ReplayedStep
from rematic.journal import JournalError, describe_plan, text_table
from rematic.policy import LADDER, PLANNED

Event = dict[str, Any]

_DURING = frozenset({"evict", "retry", "stop", "notice", "compare"})
_AFTER = frozenset({"decision", "switch", "rollback", "pin", "unpin", "release", "refused"})


def run_explain(arguments: argparse.Namespace) -> int:
    """Prints what decided a step: evidence, rule, alternatives, and what followed.

    Raises:
        JournalError: There is no run, its journal is damaged, or has no such step.
    """
    with naming_damage(arguments):
        text = _explanation(events_of_run(arguments), arguments)
    print(text)
    return DONE


def _explanation(events: Iterable[Event], arguments: argparse.Namespace) -> str:
    search = _Search(arguments.step)
    for event in events:
        search.take(event)
    step, around = search.found(), search.around
    others = control.alternatives(step, (*LADDER, PLANNED))
    if not arguments.json:
        return "\n".join(_lines(step, others, around))
    plain = {
        "step": dict(step.event),
        "verdict": step.decision.risk._asdict(),
        "alternatives": [other._asdict() for other in others],
        "events": around,
    }
    return json.dumps(plain, indent=2)


class _Search:
    """Looks for a step as it was trained last, and for the events that belong to it.

    Args:
        number: Number of the step; None for the last one.
    """

    def __init__(self, number: int | None) -> None:
        self.around: list[Event] = []
        """What happened during the step, and what followed from it."""
        self._number = number
        self._replay = control.Replay()
        self._step: ReplayedStep | None = None
        self._numbers: tuple[int, int] | None = None
        self._is_there = False
        self._during: list[Event] = []
        self._is_followed = False

    def take(self, event: Event) -> None:
        """Takes the next event of the journal."""
        step, kind = self._replay.take(event), event["event"]
        if kind == "step":
            self._is_there = self._is_there or event["step"] == self._number
        if step is not None and self._is_wanted(event["step"]):
            self._step, self.around, self._is_followed = step, self._during, True
        elif self._is_followed and kind in _AFTER:
            self.around.append(event)
        else:
            self._is_followed = False
        self._during = [*self._during, event] if kind in _DURING else []

    def _is_wanted(self, number: int) -> bool:
        low, high = self._numbers or (number, number)
        self._numbers = min(low, number), max(high, number)
        return number == (self._numbers[1] if self._number is None else self._number)

    def found(self) -> ReplayedStep:
        """Returns the step.

        Raises:
            JournalError: There is none.
        """
        if self._step is not None:
            return self._step
        if self._numbers is None:
            raise JournalError(
                "the journal holds no step that can be explained; expected one of a run"
            )
        if self._is_there:
            raise JournalError(
                f"step {self._number} cannot be explained: the journal lacks what it was decided "
                "from, or lines before it"
            )
        raise JournalError(
            f"there is no step {self._number} in the journal: expected one from "
            f"{self._numbers[0]} to {self._numbers[1]}"
        )


def _lines(step: ReplayedStep, others: Sequence[Alternative], around: Sequence[Event]) -> list[str]:
    event, risk = step.event, step.decision.risk
    lines = [
        f"step {event['step']}: {event['batch']} x {event['length']} tokens under policy "
        f"{event['policy']}{', pinned' if event.get('pinned') else ''}",
        f"plan       {describe_plan(event['plan'])}",
        f"rule       {event['reason']}",
        f"predicted  {format_bytes(event['predicted_peak_bytes'])}",
        f"measured   {format_bytes(event['peak_bytes'])} at {event['peak_source']}, "
        f"{event['seconds']:.3f} s, budget {format_bytes(event['budget_bytes'])}",
        f"verdict    {risk.verdict}: {risk.rule}",
        *[f"           {name} {value:,}" for name, value in risk.evidence],
        f"remedy     {control.REMEDIES[risk.verdict]}",
        "",
        _table(others),
    ]
    if around:
        lines += ["", *[_line(one) for one in around]]
    return lines


def _table(others: Sequence[Alternative]) -> str:
    rows = [
        (
            f"{other.policy}{' (in force)' if other.is_chosen else ''}",
            format_bytes(other.predicted_peak_bytes),
            "not seen" if other.seconds is None else f"{other.seconds:.3f}",
        )
        for other in others
    ]
    return text_table(("policy", "predicted peak", "seconds"), rows)


def _line(event: Event) -> str:
    kind = event["event"]
    if kind == "retry" and event["level"] == "step":
        failed = f"{event['failed']} ran out of memory at {event['where']}"
        return f"retry: {failed}, then came {event['next']}"
    if kind in ("evict", "retry"):
        where = event.get("where", "at the end of a unit")
        return f"{kind}: {where}, {format_bytes(event.get('bytes_freed'))} freed"
    if kind == "decision":
        change = "" if event["change"] == "none" else f", {event['change']} to {event['policy']}"
        return f"decision: {event['rule']}{change}" + "".join(map(_gate, event["gates"]))
    if kind == "compare":
        policy = event.get("policy", "the policy before")
        text = f"compare: loss {event['loss']}, {event['previous_loss']} under {policy}"
        why = f" ({event['rule']})" if "rule" in event else ""
        return f"{text}; gradients {event['gradient_difference']:.4g} apart{why}"
    if kind == "notice":
        return f"notice: {event['unit'] or 'the model'}: {event['text']}"
    if kind == "release":
        return f"release: {format_bytes(event['bytes_freed'])} given back"
    if "from" in event:
        return f"{kind}: from {event['from']} to {event['to']}, {event['reason']}"
    return f"{kind}: {event['reason']}"


def _gate(gate: dict[str, Any]) -> str:
    outcome = {True: "met", False: "missed", None: "not judged"}[gate["passed"]]
    numbers = [
        f"{name} {gate[name]:.4g}"
        for name in ("measured", "baseline", "bound")
        if gate[name] is not None
    ]
    return f"\n  gate {gate['name']} {outcome}: {', '.join(numbers) or 'no numbers'} {gate['unit']}"

"""`rematic status RUN`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rematic.byte_sizes import format_bytes
from rematic.cli.exit_codes import DONE
from rematic.cli.run_events import events_of_run, naming_damage
from rematic.control.policy_trail import CHANGES

Event = dict[str, Any]


def run_status(arguments: argparse.Namespace) -> int:
    """Prints where a run stands: policy, last step, verdict, last changes.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    with naming_damage(arguments):
        status = status_of(events_of_run(arguments), now=time.time())
        text = json.dumps(status, indent=2) if arguments.json else _text(status)
    print(text)
    return DONE


def status_of(events: Iterable[Event], *, now: float) -> dict[str, Any]:
    """Returns where a run stands.

    Args:
        events: Its events; at least one.
        now: Seconds since the epoch.
    """
    seen = _Seen()
    for event in events:
        seen.take(event)
    assert seen.event is not None
    step, decision = seen.last.get("step"), seen.last.get("decision")
    change, ended = seen.change, seen.event["event"] == "run_end"
    return {
        "state": seen.event["status"] if ended else "running, or killed",
        "seconds_since_last_event": round(now - seen.event["time"], 1),
        "policy": seen.policy,
        "pinned": seen.pinned,
        "last_step": None if step is None else step["step"],
        "peak_bytes": None if step is None else step["peak_bytes"],
        "budget_bytes": None if step is None else step["budget_bytes"],
        "verdict": "ok" if decision is None else decision["settled"],
        "last_change": change and {k: change[k] for k in ("event", "to", "step", "reason")},
        "question": seen.question,
        "last_request": seen.last.get("request"),
    }


@dataclass
class _Seen:
    """What has been read so far."""

    event: Event | None = None
    """The last event."""
    last: dict[str, Event] = field(default_factory=dict)
    """The last one of each kind."""
    change: Event | None = None
    policy: str | None = None
    pinned: bool = False
    question: str | None = None

    def take(self, event: Event) -> None:
        kind = event["event"]
        self.event = self.last[kind] = event
        self.question = event.get("person") or self.question
        if kind == "step":
            self.policy, self.pinned = event["policy"], event.get("pinned", False)
        elif kind in CHANGES:
            self.change, self.policy = event, event["to"]
            self.pinned = kind == "pin" or (self.pinned and kind != "unpin")
        elif kind == "attach":
            self.policy, self.pinned = event["policy"], False


def _text(status: dict[str, Any]) -> str:
    change, request = status["last_change"], status["last_request"]
    pinned = ", pinned" if status["pinned"] else ""
    lines = [
        f"state     {status['state']}; last event {status['seconds_since_last_event']} s ago",
        f"policy    {status['policy']}{pinned}",
        f"last step {status['last_step']}, peak {format_bytes(status['peak_bytes'])} of "
        f"{format_bytes(status['budget_bytes'])}",
        f"verdict   {status['verdict']}",
    ]
    if change:
        lines.append(
            f"change    {change['event']} to {change['to']} before step {change['step']}: "
            f"{change['reason']}"
        )
    if request:
        lines.append(f"request   {request['request']} {request['status']}: {request['reason']}")
    if status["question"]:
        lines.append(f"question  {status['question']}")
    return "\n".join(lines)

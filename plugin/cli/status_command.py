"""`rematic status RUN`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from rematic.byte_sizes import format_bytes
from rematic.cli.exit_codes import DONE
from rematic.cli.run_events import events_of_run, naming_damage

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


def status_of(events: Sequence[Event], *, now: float) -> dict[str, Any]:
    """Returns where a run stands.

    Args:
        events: Its events; at least one.
        now: Seconds since the epoch.
    """
    last: dict[str, Event] = {}
    for event in events:
        last[event["event"]] = event
    step, decision = last.get("step"), last.get("decision")
    change = next((e for e in reversed(events) if e["event"] in _CHANGES), None)
    policy, pinned = _policy(events)
    ended = last.get("run_end")
    is_over = ended is not None and ended is events[-1]
    return {
        "state": ended["status"] if is_over and ended else "running, or killed",
        "seconds_since_last_event": round(now - events[-1]["time"], 1),
        "policy": policy,
        "pinned": pinned,
        "last_step": None if step is None else step["step"],
        "peak_bytes": None if step is None else step["peak_bytes"],
        "budget_bytes": None if step is None else step["budget_bytes"],
        "verdict": "ok" if decision is None else decision["settled"],
        "last_change": change and {k: change[k] for k in ("event", "to", "step", "reason")},
        "question": next((e["person"] for e in reversed(events) if e.get("person")), None),
        "last_request": last.get("request"),
    }


_CHANGES = ("switch", "rollback", "pin", "unpin")


def _policy(events: Sequence[Event]) -> tuple[str | None, bool]:
    policy, pinned = None, False
    for event in events:
        kind = event["event"]
        if kind == "step":
            policy, pinned = event["policy"], event.get("pinned", False)
        elif kind in _CHANGES:
            policy = event["to"]
            pinned = kind == "pin" or (pinned and kind != "unpin")
        elif kind == "attach":
            policy, pinned = event["policy"], False
    return policy, pinned


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

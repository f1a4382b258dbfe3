"""The events that a session writes about itself, in plain types."""

from __future__ import annotations

from typing import Any

from rematic.activations import Engine, Notice
from rematic.control import Change, Meeting, StopReport, format_stop
from rematic.memory import Probe
from rematic.open_step import OpenStep
from rematic.policy import LADDER, Policy, policy_to_plain


def attach_event(
    engine: Engine, probe: Probe, policy: Policy, *, budget_bytes: int | None
) -> dict[str, Any]:
    """Returns what a session starts with."""
    return {
        "event": "attach",
        "units": list(engine.classes),
        "budget_bytes": budget_bytes,
        "capacity_bytes": probe.snapshot().capacity_bytes,
        "probe": probe.kind,
        "policy": policy.name,
        "ladder": [rung.name for rung in LADDER],
    }


def change_event(change: Change, before: Policy, after: Policy, *, step: int) -> dict[str, Any]:
    """Returns a change of policy that was made."""
    return {
        "event": change.kind,
        "from": before.name,
        "to": after.name,
        "step": step,
        "reason": change.reason,
        "policy": policy_to_plain(after),
    }


def agreement_event(meeting: Meeting, change: Change, *, step: int) -> dict[str, Any]:
    """Returns what became of a change that a rank has proposed, unless all ranks have made it."""
    assert meeting.proposal is not None
    return {
        "event": "agreement",
        "step": step,
        "status": meeting.verdict or "proposed",
        "change": change.kind,
        "policy": None if change.policy is None else change.policy.name,
        "rank": meeting.proposal.rank,
        "boundary": meeting.proposal.boundary,
        "reason": meeting.reason or change.reason,
    }


def notice_event(notice: Notice, *, step: int) -> dict[str, Any]:
    """Returns what was found out about a unit."""
    return {
        "event": "notice",
        "step": step,
        "unit": notice.unit,
        "kind": notice.kind,
        "text": notice.text,
        "figures": dict(notice.figures),
    }


def report_event(report: StopReport, *, step: int) -> dict[str, Any]:
    """Returns the end of a training for which memory ran out."""
    return {
        "event": "stop",
        "step": step,
        "reason": report.obstacle or "every attempt that is allowed ran out of memory",
        "report": format_stop(report),
        **report.to_plain(),
    }


def stop_event(step: OpenStep, error: BaseException) -> dict[str, Any]:
    """Returns the end of a step for which memory ran out."""
    return {
        "event": "stop",
        "step": step.number,
        "reason": "out of memory, and nothing was left to evict",
        "report": f"{type(error).__name__}: {error}",
        "batch": step.shape.batch,
        "length": step.shape.length,
    }

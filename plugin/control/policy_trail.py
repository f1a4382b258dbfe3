"""Whether steps and changes of a journal follow from each other: numbers, policies, pins. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rematic.control.damaged import DamageNamed, ends_what_is_known

Event = Mapping[str, Any]

CHANGES = frozenset({"switch", "rollback", "pin", "unpin"})
"""Kinds of events that put a policy in force, or pin it."""


class Mismatch(NamedTuple):
    """A field of an event that does not follow from the events before it."""

    step: int
    """The step, or the one before which a change came."""
    field: str
    """The field, with its kind of event before it where that is a change."""
    written: object
    """What the journal says."""
    followed: object
    """What follows from the events before."""


@dataclass
class _Trail:
    """What is known of the step that comes; None in a field means that it is not."""

    step: int | None
    policy: Any
    pinned: bool | None = None
    depth: int | None = None


class PolicyTrail:
    """Follows numbers, policies and pins from event to event.

    A step whose number does not follow is told once, since lines are missing before it; from the
    next `control` event on everything follows again.
    """

    def __init__(self) -> None:
        self._trail: _Trail | None = None

    def take(self, event: Event) -> list[Mismatch]:
        """Takes the next event; returns what in it does not follow from those before it.

        Raises:
            DamagedEventError: If the event is not what rematic writes.
        """
        with DamageNamed(event):
            kind = event["event"]
            if ends_what_is_known(event):
                self._trail = None
            elif kind == "control":
                self._trail = _Trail(step=event.get("step"), policy=event["policy"])
            elif self._trail is not None and kind in CHANGES:
                return list(_change(self._trail, event))
            elif self._trail is not None and kind == "step":
                found = list(_step(self._trail, event))
                if any(mismatch.field == "step" for mismatch in found):
                    self._trail = None
                return found
        return []


def _change(trail: _Trail, event: Event) -> Iterator[Mismatch]:
    kind, before, after = event["event"], trail.policy, event["policy"]
    known = {"step": trail.step, "from": before["name"], "to": after["name"]}
    for field, value in known.items():
        if value is not None and event.get(field) != value:
            yield Mismatch(event["step"], f"{kind}.{field}", event.get(field), value)
    trail.policy = after
    if kind in ("pin", "unpin"):
        trail.pinned = kind == "pin"
    if kind == "rollback":
        trail.depth = None  # it may have gone back several switches
    elif trail.depth is not None and (kind == "switch" or (kind == "pin" and after != before)):
        trail.depth += 1


def _step(trail: _Trail, event: Event) -> Iterator[Mismatch]:
    known = {
        "step": trail.step,
        "policy": trail.policy["name"],
        "pinned": trail.pinned,
        "depth": trail.depth,
    }
    for field, value in known.items():
        if value is not None and event.get(field, value) != value:
            yield Mismatch(event["step"], field, event[field], value)
    trail.step = event["step"] + 1
    trail.pinned, trail.depth = event.get("pinned"), event.get("depth")

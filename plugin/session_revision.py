"""What a session does about a configuration that is not the one its saved state began with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from rematic.byte_sizes import format_bytes
from rematic.control import ControllerState
from rematic.session_configuration import Configuration
from rematic.session_state import SavedSession

_SAME_BUDGET = 0.05
"""A budget so near another one is the same: `auto` and shares vary with what others hold."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What follows from a configuration that has changed."""

    controller: ControllerState
    """What the controller remembers."""

    configured: Configuration
    """What the session's own state says that it was attached with."""

    takes_policy: bool = False
    """Whether the configured policy takes the place of the saved one."""

    text: str = ""
    """What a person should know of it; empty for nothing."""


def revise(saved: SavedSession, now: Configuration, *, allow_lossy: bool) -> Revision:
    """Returns how a session goes on: as it was saved, but for what was configured otherwise since.

    A policy that was configured anew follows the saved one, unless that is pinned. What was held
    against policies under other goals or another budget is forgotten.

    Args:
        saved: The state that is taken up.
        now: What the session was attached with.
        allow_lossy: Whether a policy that loses precision may be in force.
    """
    before, current = saved.configured, saved.history.current
    controller, texts = saved.controller, []
    if changes := _changes(before, now):
        controller = _forgiven(controller)
        texts.append(f"{changes}: what was held against policies before is forgotten")
    takes_policy, configured = False, now
    if current.is_lossy and not allow_lossy:
        takes_policy = True
        texts.append(
            f"the saved run was under {current.name!r}, which loses precision and is not allowed "
            f"now: {now.policy.name!r} takes its place"
        )
    elif now.policy != before.policy and current != now.policy:
        takes_policy = not saved.history.pinned
        changed = f"the saved run began with the policy {before.policy.name!r}"
        if takes_policy:
            texts.append(f"{changed}, {now.policy.name!r} is configured now and takes its place")
        else:
            configured = replace(now, policy=before.policy)  # said again whenever it is resumed
            texts.append(
                f"{changed}, {now.policy.name!r} is configured now and has no effect: "
                f"{current.name!r} is pinned. Unpin it, and switch"
            )
    return Revision(
        controller=controller,
        configured=configured,
        takes_policy=takes_policy,
        text="; ".join(texts),
    )


def _changes(before: Configuration, now: Configuration) -> str:
    """What else was configured otherwise, in words; empty for nothing."""
    words = []
    if _is_other(before.budget_bytes, now.budget_bytes):
        budgets = (_budget(one.budget_bytes) for one in (before, now))
        words.append("budget ({} before, {} now)".format(*budgets))
    if before.rules.goals != now.rules.goals:
        words.append("goals")
    if before.rules.pace != now.rules.pace or before.rules.adapt != now.rules.adapt:
        words.append("control")
    return f"configured otherwise since it was saved: {', '.join(words)}" if words else ""


def _is_other(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before != now
    return abs(before - now) > _SAME_BUDGET * before


def _budget(num_bytes: int | None) -> str:
    return "none" if num_bytes is None else format_bytes(num_bytes)


def _forgiven(state: ControllerState) -> ControllerState:
    return state._replace(
        quarantine=MappingProxyType({}),
        cool_until=0,
        cool_factor=1,
        returned=False,
        switches=(),
        told=(),
    )

"""A change of the policy in force, as a value that can wait for a boundary or go to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rematic.control.history import History, pinned, rolled_back, switched, unpinned
from rematic.policy import Policy, policy_from_plain, policy_to_plain

ChangeKind = Literal["switch", "rollback", "pin", "unpin"]

Rejected = tuple[tuple[str, int, str], ...]
"""Policies that a controller has rejected: name, `length_bucket`, why."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was asked for."""

    kind: ChangeKind
    """Its kind, as in the journal."""

    reason: str
    """Why."""

    policy: Policy | None = None
    """The policy that comes; None for a rollback and an unpin."""

    steps: int = 1
    """How many switches a rollback goes back."""

    by_controller: bool = False
    """Whether nobody asked for it but a controller."""

    rejected: Rejected = ()
    """What its controller is not going to take again."""

    def is_like(self, other: Change) -> bool:
        """Returns whether both ask for the same, whoever does and why."""
        return (self.kind, self.policy, self.steps) == (other.kind, other.policy, other.steps)


def changed(history: History, change: Change, *, step: int) -> History:
    """Returns the history after a change.

    Raises:
        ValueError: If the policy is pinned, or there are not so many switches to go back.
    """
    if change.kind == "rollback":
        return rolled_back(history, steps=change.steps)
    if change.kind == "unpin":
        return unpinned(history)
    assert change.policy is not None
    put = switched if change.kind == "switch" else pinned
    return put(history, change.policy, step=step, reason=change.reason)


def change_to_plain(change: Change) -> dict[str, Any]:
    """Returns the change as dictionaries, lists, strings and numbers."""
    return {
        **vars(change),
        "policy": None if change.policy is None else policy_to_plain(change.policy),
        "rejected": [list(item) for item in change.rejected],
    }


def change_from_plain(plain: Mapping[str, Any]) -> Change:
    """Returns the change that `change_to_plain` wrote."""
    policy = plain["policy"]
    return Change(
        kind=plain["kind"],
        reason=plain["reason"],
        policy=None if policy is None else policy_from_plain(policy),
        steps=plain["steps"],
        by_controller=plain["by_controller"],
        rejected=tuple((name, bucket, why) for name, bucket, why in plain["rejected"]),
    )

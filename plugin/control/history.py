"""Which policy is in force, which were before it, and whether it is pinned. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematic.policy import Policy


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """A policy that came into force."""

    policy: Policy
    """The policy, with its rules."""

    step: int
    """Micro-batch before which it came into force."""

    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The policies of a run, oldest first; the last one is in force."""

    entries: tuple[HistoryEntry, ...]
    """Every policy that can be gone back to, and the one in force."""

    pinned: bool = False
    """Whether only `unpin` may change the policy."""

    @property
    def current(self) -> Policy:
        """The policy in force."""
        return self.entries[-1].policy


def switched(history: History, policy: Policy, *, step: int, reason: str) -> History:
    """Returns the history with another policy in force.

    Raises:
        ValueError: If the policy is pinned.
    """
    _refuse_if_pinned(history, f"switch to {policy.name!r}")
    entry = HistoryEntry(policy=policy, step=step, reason=reason)
    return replace(history, entries=(*history.entries, entry))


def rolled_back(history: History, *, steps: int) -> History:
    """Returns the history as it was `steps` switches ago.

    Raises:
        ValueError: If there are not so many switches, or the policy is pinned.
    """
    available = len(history.entries) - 1
    if type(steps) is not int or not 1 <= steps <= available:
        expected = f"expected a number from 1 to {available}, the switches so far"
        if not available:
            expected = f"there were none, {history.current.name!r} is the first policy"
        raise ValueError(f"cannot roll back {steps!r} switches: {expected}.")
    _refuse_if_pinned(history, f"roll back {steps} switches")
    return replace(history, entries=history.entries[:-steps])


def pinned(history: History, policy: Policy, *, step: int, reason: str) -> History:
    """Returns the history with `policy` in force until it is unpinned."""
    free = replace(history, pinned=False)
    if policy != history.current:
        free = switched(free, policy, step=step, reason=reason)
    return replace(free, pinned=True)


def unpinned(history: History) -> History:
    """Returns the history with the policy free to change."""
    return replace(history, pinned=False)


def policy_in_history(history: History, name: str) -> Policy | None:
    """Returns the newest policy of that name, with its rules; None if there was none."""
    found = [entry.policy for entry in history.entries if entry.policy.name == name]
    return found[-1] if found else None


def switches_since(history: History, name: str) -> int:
    """Returns how many switches lie behind the newest earlier policy of that name; 1 for none."""
    earlier = [entry.policy.name for entry in reversed(history.entries[:-1])]
    return 1 + earlier.index(name) if name in earlier else 1


def _refuse_if_pinned(history: History, wish: str) -> None:
    if history.pinned:
        raise ValueError(
            f"cannot {wish}: the policy {history.current.name!r} is pinned. Call `unpin` first."
        )

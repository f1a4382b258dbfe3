"""The policies of a session: which is in force, and changes that wait for a boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rematic.control import History, HistoryEntry
from rematic.policy import Policy, policy_named, resolve
from rematic.session_events import change_event

MakeHistory: TypeAlias = Callable[[History, int], History]
"""Returns the history after a change, given the one before it and the number of the micro-batch."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change of policy that was asked for and waits for a boundary."""

    event: str
    """Its kind in the journal."""

    reason: str
    """Why."""

    make: MakeHistory
    """Makes the history after it."""


class PolicyChanges:
    """Holds the history of policies and changes it between steps, never inside one (contract 7).

    Args:
        policy: The first policy.
        classes: Class of each unit by its name.
        write: Writes an event to the journal.
        allow_lossy: Whether a policy that loses precision may follow.
    """

    def __init__(
        self,
        policy: Policy,
        classes: Mapping[str, str],
        write: Callable[[Mapping[str, Any]], None],
        *,
        allow_lossy: bool,
    ) -> None:
        self._allow_lossy = allow_lossy
        self._classes = classes
        self._write = write
        self.actions = resolve(policy, classes)
        """What the policy in force says of each unit; None leaves it to the plan."""
        entry = HistoryEntry(policy=policy, step=0, reason="the first policy")
        self.history = History(entries=(entry,))
        """The policies so far, the one in force last."""
        self.at_boundary = True
        """Whether no step has begun since the last boundary."""
        self.pending: list[_Change] = []
        """What was asked for since."""

    def allowed(self, to: str | Policy) -> Policy:
        """Returns the policy that is meant, if it may be put in force.

        Raises:
            ValueError: If there is none, it loses precision and must not, or one of its rules
                matches nothing.
        """
        policy = policy_named(to)
        if policy.is_lossy and not self._allow_lossy:
            raise ValueError(
                f"policy {policy.name!r} loses precision (`compress`): expected a lossless one. "
                "Write `policy: {allow_lossy: true}` in the recipe to allow it, or attach with it."
            )
        resolve(policy, self._classes)
        return policy

    def ask(self, event: str, reason: str, make: MakeHistory, *, step: int) -> None:
        """Changes the history at the next boundary; refuses at once what could not be done then."""
        change = _Change(event=event, reason=reason, make=make)
        history = self.history
        for earlier in (*self.pending, change):
            history = earlier.make(history, step)
        self.pending.append(change)

    def pass_boundary(self, *, step: int) -> None:
        """Puts into force what was asked for."""
        self.at_boundary = True
        pending, self.pending = self.pending, []
        for change in pending:
            before = self.history.current
            self.take_up(change.make(self.history, step))
            after = self.history.current
            self._write(change_event(change.event, before, after, step=step, reason=change.reason))

    def take_up(self, history: History) -> None:
        """Puts the last policy of a history into force."""
        self.history = history
        self.actions = resolve(history.current, self._classes)

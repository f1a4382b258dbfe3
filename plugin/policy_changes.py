"""The policies of a session: which is in force, and changes that wait for a boundary."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rematic.control import (
    Change,
    History,
    HistoryEntry,
    Meeting,
    change_from_plain,
    change_to_plain,
    changed,
)
from rematic.control.agreement import DISTANCE
from rematic.policy import Plan, Policy, policy_to_plain, resolve
from rematic.rank_agreement import RankAgreement, make_agreement
from rematic.session_events import agreement_event, change_event
from rematic.transaction import num_ranks

_log = logging.getLogger("rematic")
_TOLD_FROM = 8 * DISTANCE
"""Changes that are late are told of from the round on that leads to such a distance."""


class PolicyChanges:
    """Holds the history of policies and changes it between steps, never inside one (contract 7).

    On several ranks a change that was asked for on one of them comes on all at a later boundary.

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
        self._agreement: RankAgreement | None = None
        self._has_looked = False
        self.actions = resolve(policy, classes)
        """What the policy in force says of each unit; None leaves it to the plan."""
        entry = HistoryEntry(policy=policy, step=0, reason="the first policy")
        self.history = History(entries=(entry,))
        """The policies so far, the one in force last."""
        self.at_boundary = True
        """Whether no step has begun since the last boundary."""
        self.pending: list[Change] = []
        """What was asked for and has not come."""
        self.objection: Callable[[Change], str | None] = lambda change: None
        """Returns what speaks against a change that another rank's controller asks for."""
        self.at_agreed: Callable[[Change], None] = lambda change: None
        """Called with a change that all ranks have made."""

    @property
    def agreement(self) -> RankAgreement | None:
        """The agreement with other ranks; None in runs of one process."""
        if num_ranks() == 1:  # or not yet: a session may be there before its process group
            return None
        if not self._has_looked:
            self._has_looked = True
            self._agreement = make_agreement(self._classes)
            if self._agreement is not None:
                self._agreement.begin(json.dumps(policy_to_plain(self.history.current)))
        return self._agreement

    def refuse_other_start(self, joint_units: Sequence[str]) -> None:
        """Refuses a step that would wait for ranks which replay other units.

        Args:
            joint_units: Units that only all ranks together can replay.

        Raises:
            ValueError: If there are some, and ranks have begun with different policies.
        """
        if joint_units and self.agreement is not None and self.agreement.has_other_start:
            raise ValueError(
                f"this rank has begun with the policy {self.history.entries[0].policy.name!r} and "
                f"another rank with another one, but {joint_units[0]} exchanges tensors with other "
                "ranks: expected one policy for all. Attach with the same on every rank, and "
                "change it by `switch`."
            )

    def check(self, policy: Policy) -> None:
        """Refuses a policy that must not be put in force.

        Raises:
            ValueError: If it loses precision and must not, or one of its rules matches nothing.
        """
        if policy.is_lossy and not self._allow_lossy:
            raise ValueError(
                f"policy {policy.name!r} loses precision (`compress`): expected a lossless one. "
                "Write `policy: {allow_lossy: true}` in the recipe to allow it, or attach with it."
            )
        resolve(policy, self._classes)

    def agreed(self, plan: Plan) -> list[bool]:
        """Returns for each unit whether its action is the policy's, not that of this rank alone."""
        said = zip(self.actions, plan.actions, strict=True)
        return [action is not None and action == planned for action, planned in said]

    def ask(self, change: Change, *, step: int) -> None:
        """Makes a change at a boundary to come; refuses at once what could not be done now.

        Where no step has begun since the last boundary, and there is one process, that is at once.

        Raises:
            ValueError: If the change cannot be made.
        """
        if change.policy is not None:
            self.check(change.policy)
        history = self.history
        for earlier in (*self.pending, change):
            history = changed(history, earlier, step=step)
        self.pending.append(change)
        if self.at_boundary:
            self._settle(step)

    def pass_boundary(self, *, step: int) -> None:
        """Puts into force what was asked for, or what ranks have agreed on for this boundary."""
        self.at_boundary = True
        if self.agreement is not None:
            self.agreement.boundary += 1
        self._settle(step)

    def take_up(self, history: History) -> None:
        """Puts the last policy of a history into force."""
        self.actions = resolve(history.current, self._classes)  # first: it may refuse
        self.history = history

    def go_on(self, history: History, *, policy: Policy | None, step: int, reason: str) -> None:
        """Takes up the history of an earlier session, at once and on this rank.

        Args:
            history: The history.
            policy: What follows its last policy; None to go on with that.
            step: The micro-batch that comes.
            reason: Why another policy follows.
        """
        self.take_up(history)
        if policy is not None:
            change = Change(kind="switch", policy=policy, reason=reason)
            self.history = replace(history, pinned=False)
            self._make(change, step)
        entries = self.history.entries
        if not self._allow_lossy:  # nor is one gone back to
            entries = tuple(entry for entry in entries if not entry.policy.is_lossy)
        self.history = replace(self.history, entries=entries)

    def _settle(self, step: int) -> None:
        if self.agreement is None:
            pending, self.pending = self.pending, []
            for change in pending:
                self._make(change, step)
            return
        for meeting in self.agreement.meet(lambda: self._wish(step), self._against):
            self._follow(meeting, step)

    def _make(self, change: Change, step: int, **more: object) -> None:
        before = self.history.current
        self.take_up(changed(self.history, change, step=step))
        event = change_event(change, before, self.history.current, step=step)
        self._write({**event, **more})

    def _wish(self, step: int) -> str | None:
        """Returns what this rank would propose: what a person asked for before the controller's."""
        for change in sorted(self.pending, key=lambda change: change.by_controller):
            refused = self._obstacle(change)
            if refused is None:
                return json.dumps(change_to_plain(change))
            self.pending.remove(change)  # others have changed what it was to be made on
            self._write(
                {"event": "refused", "step": step, "change": change.kind, "reason": refused}
            )
        return None

    def _obstacle(self, change: Change) -> str | None:
        try:
            changed(self.history, change, step=0)
            if change.policy is not None:
                self.check(change.policy)
        except ValueError as error:
            return str(error)
        return None

    def _against(self, text: str) -> str | None:
        change = change_from_plain(json.loads(text))
        return self._obstacle(change) or self.objection(change)

    def _follow(self, meeting: Meeting, step: int) -> None:
        """Does what ranks have agreed on, and takes down what became of a proposal."""
        proposal = meeting.proposal
        assert proposal is not None
        change = change_from_plain(json.loads(proposal.change))
        if meeting.verdict == "agreed":
            self._settled(change)
            # decided under the policy that is left now
            self.pending = [wish for wish in self.pending if not wish.by_controller]
            self._make(change, step, rank=proposal.rank)
            self.at_agreed(change)
            return
        self._write(agreement_event(meeting, change, step=step))
        if meeting.verdict is not None:
            self._tell(meeting, change)
        if meeting.verdict == "refused":
            self._settled(change)

    def _tell(self, meeting: Meeting, change: Change) -> None:
        if meeting.verdict == "late" and meeting.standing.distance < _TOLD_FROM:
            return  # hosts that run ahead of each other meet in the next rounds
        _log.warning(
            "a %s%s was %s by the ranks: %s",
            change.kind,
            "" if change.policy is None else f" to {change.policy.name}",
            "refused" if meeting.verdict == "refused" else "not answered",
            meeting.reason,
        )

    def _settled(self, change: Change) -> None:
        """Forgets what this rank had asked for itself."""
        same = next((wish for wish in self.pending if wish.is_like(change)), None)
        if same is not None:
            self.pending.remove(same)

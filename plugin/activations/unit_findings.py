"""What has been found out about a unit, and what the log and the journal are told of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rematic.activations.hidden_stash import HiddenStash
from rematic.activations.ledger import Ledger
from rematic.activations.notices import Notice, words_of
from rematic.activations.record import Record
from rematic.activations.surroundings import Surroundings
from rematic.memory import is_out_of_memory

_log = logging.getLogger("rematic")


class UnitFindings:
    """Knows why a unit is kept, if it is, and says everything once.

    Args:
        name: The unit's name.
        ledger: The ledger of its model's records.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger
        self.pinned: str | None = None
        """Why this unit's records are never evicted, None if they can be."""
        self.joint: str | None = None
        """The collective that its forward was seen to begin, None for none."""
        self.graphless = False
        """Whether its graph keeps tensors unseen, so that records which do not start held do
        without one."""
        self.refused = False
        """Whether its forward changes what neither a replay nor a retry finds as it was."""
        self._notes: set[str] = set()

    def note_once(self, text: str) -> None:
        """Logs what is unusual about a call of this unit, once whatever numbers are in it."""
        self._note(text, self._notes)

    def note_for_all(self, text: str) -> None:
        """Logs what is unusual about a call, at the first unit of the model that meets it."""
        self._note(text, self.ledger.notes_for_all)

    def _note(self, text: str, said: set[str]) -> None:
        words = words_of(text)
        if words not in said:
            said.add(words)
            _log.warning("unit %r: %s", self.name, text)
            self.tell("call", text)

    def tell(self, kind: str, text: str, figures: Mapping[str, float] | None = None) -> None:
        """Tells the journal what was found out about this unit."""
        self.ledger.tell(Notice(unit=self.name, kind=kind, text=text, figures=figures or {}))

    def take_note_of(self, hidden: HiddenStash) -> None:
        """Takes note of what its graph keeps unseen."""
        self.graphless = hidden.is_closed
        figures = {"hidden": hidden.hidden_bytes, "declared": hidden.declared_bytes}
        _log.info("unit %r: %s", self.name, hidden.text)
        self.tell("hidden_stash", hidden.text, figures)

    def refuse(self, record: Record, objection: str) -> None:
        """Keeps it under every policy, unless the user vouches for it."""
        self.refused = True
        reason = objection.rstrip(".")
        self.pin(record, f"{reason}. If you know better, name it in `policy.trust`")

    def _can_run_again(
        self, error: RuntimeError, record: Record | None, surroundings: Surroundings | None
    ) -> bool:
        """Returns whether a forward that failed may run again, as it did the first time.

        Args:
            error: What it raised.
            record: Its record, None if there was no room for one.
            surroundings: What it can reach outside, if that was read before.
        """
        return (
            is_out_of_memory(error)
            and self.joint is None  # the other ranks would not run it again
            and not self.refused
            and (record is None or not record.arguments.mutated_positions())
            and (surroundings is None or surroundings.change() is None)
        )

    def pin(self, record: Record, reason: str) -> None:
        """Keeps it under every policy, and the record of the call that showed why."""
        record.pinned = reason.split(". ")[0]
        if self.pinned is None:
            self.pinned = record.pinned
            text = f"is kept under every policy, since it cannot be replayed: {reason}."
            _log.warning("unit %r %s", self.name, text)
            self.tell("kept", text)

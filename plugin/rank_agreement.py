"""Puts a change of policy into force on all ranks at the same boundary, without a collective.

What ranks tell each other goes through the store of the process group, whose requests do not wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from rematic.activations.torch_private import process_group_store
from rematic.control import Meeting, Standing, meet
from rematic.control.agreement import Ask
from rematic.journal import EventSink
from rematic.transaction import num_ranks, this_rank

_log = logging.getLogger("rematic")
_ORDINALS: Counter[str] = Counter()
"""How many sessions of this process have agreed with others, by their units."""

ROUNDS_MAX = 16
"""Rounds that are read at one boundary, by a rank that had fallen behind."""


class KeyStore(Protocol):
    """What is asked of the store of a process group; `torch.distributed.Store` has it."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are there."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that is not there if `expected` is empty; returns the value afterwards."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""


class RankAgreement:
    """This rank's part in the agreement.

    Args:
        store: The store, or the part of it that belongs to the session.
        rank: This rank.
        num_ranks: How many there are.
    """

    def __init__(self, store: KeyStore, *, rank: int, num_ranks: int) -> None:
        self.has_other_start = False
        """Whether this rank has begun with another policy than the rank that asked first."""
        self.boundary = 0
        """Number of the boundary that this rank is at."""
        self._store: KeyStore | None = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._standing = Standing()

    def begin(self, policy: str) -> None:
        """Tells the others what policy this rank begins with."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # it is told of at the next boundary
                first = _reply(self._store, Ask("put", "first policy", policy))
                self.has_other_start = first != policy

    def meet(
        self, wish: Callable[[], str | None], objection: Callable[[str], str | None]
    ) -> Iterable[Meeting]:
        """Yields what is new at this boundary: a proposal, a verdict.

        After a verdict `agreed` the change must be made before the next one is asked for.

        Args:
            wish: Returns what this rank would propose now, None for nothing.
            objection: Returns why this rank cannot make a change, None if it can.
        """
        for _ in range(ROUNDS_MAX):
            meeting = self._talk(wish(), objection)
            if meeting is None:
                return
            self._standing = meeting.standing
            if meeting.proposal is not None:
                yield meeting
            if meeting.verdict is None:
                return

    def _talk(self, wish: str | None, objection: Callable[[str], str | None]) -> Meeting | None:
        if self._store is None:
            return None
        talk = meet(
            self._standing,
            boundary=self.boundary,
            rank=self._rank,
            num_ranks=self._num_ranks,
            wish=wish,
            objection=objection,
        )
        reply: str | None = None
        try:
            while True:
                reply = _reply(self._store, talk.send(reply))
        except StopIteration as end:
            meeting: Meeting = end.value
            return meeting
        except RuntimeError as error:  # a rank that held the store is gone
            self._store = None
            _log.warning(
                "the store of the process group does not answer (%s): policies stay as they are on "
                "every rank from here on",
                str(error).split("\n")[0],
            )
            return None


def _reply(store: KeyStore, ask: Ask) -> str | None:
    if ask.kind == "put":
        return store.compare_set(ask.key, "", ask.value).decode()
    if ask.kind == "add":
        return str(store.add(ask.key, 1))
    return store.get(ask.key).decode() if store.check([ask.key]) else None


def journal_of_rank(journal: EventSink | None) -> EventSink | None:
    """Returns the journal, or None where another rank writes to the same file already.

    Scripts run on every rank, so that all of them name the same file, which only one can append to.

    Args:
        journal: The journal, one of a file if it has a `path`.
    """
    path = getattr(journal, "path", None)
    if path is None or num_ranks() == 1:
        return journal
    store = process_group_store("rematic/journals")
    if store is None:
        return journal
    mine = str(this_rank())
    owner = store.compare_set(str(Path(path).resolve()), "", mine).decode()
    if owner == mine:
        return journal
    _log.warning(
        "%s is written by rank %s: rank %s keeps no journal. Give each rank a file of its own to "
        "have them all.",
        path,
        owner,
        mine,
    )
    return None


def make_agreement(units: Iterable[str]) -> RankAgreement | None:
    """Returns the agreement of a session with those on the other ranks; None where there are none.

    Sessions are told apart by their units and by their order, which is the same on all ranks.

    Args:
        units: Names of the session's units.
    """
    if num_ranks() == 1:
        return None
    digest = hashlib.sha256("\n".join(units).encode()).hexdigest()[:12]
    store = process_group_store(f"rematic/{digest}/{_ORDINALS[digest]}")
    if store is None:
        _log.warning(
            "this process group has no store that ranks could agree through: call `switch`, "
            "`rollback` and `pin` on every rank in the same step"
        )
        return None
    _ORDINALS[digest] += 1
    return RankAgreement(store, rank=this_rank(), num_ranks=num_ranks())

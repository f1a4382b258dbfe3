"""The ledger of a model's records: what is resident, what to evict first, how to fill again."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from rematic.activations.harmless_writes import HarmlessWrites
from rematic.activations.hidden_stash import HiddenStash
from rematic.activations.notices import Notice
from rematic.activations.record import Holder, Record
from rematic.activations.replay import replay
from rematic.activations.reused_inputs import WaitingRecords
from rematic.activations.shared_inputs import SharedInputs
from rematic.memory import is_out_of_memory, requested_bytes


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """What one request for memory brought."""

    bytes_freed: int
    """Bytes whose storage died, measured."""

    units: tuple[str, ...]
    """Names of the units whose records were evicted, in order."""


@dataclass(kw_only=True)
class LedgerCounts:
    """Counters since the ledger began or was last counted."""

    num_evictions: int = 0
    """Records evicted."""
    evicted_bytes: int = 0
    """Bytes they let go."""
    replays: Counter[str] = field(default_factory=Counter)
    """Replays by name of unit."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one replay of a unit has shown of all of its kind."""

    objection: str | None
    """Why they cannot be replayed, None if they can."""

    hooks_act: bool
    """Whether hooks that return nothing must run in replays all the same."""

    hidden: HiddenStash | None = None
    """What their graphs hold unseen, None where that was not measured."""


class Ledger:
    """Knows every record of a model, weakly, and lets go of the cheapest bytes first."""

    def __init__(self) -> None:
        self.counts = LedgerCounts()
        self.after_forward: Callable[[Record], None] | None = None
        """Called when a unit's forward has ended, before what it does not hold on to leaves."""
        self.after_leaving: Callable[[], None] | None = None
        """Called when that was let go or moved."""
        self.at_backward: Callable[[Record], None] | None = None
        """Called when backward comes to a record, before it is replayed if it is evicted."""
        self.at_unit_retry: Callable[[str, int, Eviction], None] | None = None
        """Called with a unit's name, the bytes wanted and what was evicted, before its forward
        runs again."""
        self.at_notice: Callable[[Notice], None] | None = None
        """Called with what is found out about a unit."""
        self.verdicts: dict[Hashable, Verdict] = {}
        """What the safety check found, by kind of unit."""
        self.harmless_writes = HarmlessWrites()
        """Which parameters were written to without being changed."""
        self.notes_for_all: set[str] = set()
        """What was said of the calls of one unit and holds for the others."""
        self.waiting = WaitingRecords()
        """Records of first calls that are let go when it is known what becomes of their inputs."""
        self.shared_inputs = SharedInputs()
        """Inputs that several calls receive, which are not moved."""
        self._records: list[weakref.ref[Record]] = []
        self._purge_at = 64
        self._num_opened = 0
        self._active_serial = -1

    def tell(self, notice: Notice) -> None:
        """Passes on what was found out about a unit, if somebody listens."""
        if self.at_notice is not None:
            self.at_notice(notice)

    def open(self, record: Record) -> None:
        """Enters a record at the start of its unit's forward."""
        record.serial = self._num_opened
        self._num_opened += 1
        if len(self._records) >= self._purge_at:
            self._records = [ref for ref in self._records if ref() is not None]
            self._purge_at = 2 * len(self._records) + 64
        self._records.append(weakref.ref(record))

    def records(self) -> list[Record]:
        """Returns the records that backward still needs, oldest first."""
        self.waiting.settle()
        return [record for ref in self._records if (record := ref()) is not None]

    def resident_bytes(self) -> int:
        """Returns the bytes that evicting every record would let go."""
        return sum(record.own_bytes() for record in self.records() if record.is_evictable)

    def evict(self, num_bytes: int, *, spare_active: bool = False) -> Eviction:
        """Evicts records, most bytes per recompute second first, until `num_bytes` are free.

        Args:
            num_bytes: Bytes wanted; fewer come free if fewer are held.
            spare_active: Leave the record that backward is reading, unless it is the only one
                and was never replayed: it would have to be replayed at once.
        """
        freed, units = 0, []
        for record in self._in_order(spare_active=spare_active):
            if freed >= num_bytes:
                break
            bytes_freed = record.evict()
            if bytes_freed:
                freed += bytes_freed
                units.append(record.name)
        self.counts.num_evictions += len(units)
        self.counts.evicted_bytes += freed
        return Eviction(bytes_freed=freed, units=tuple(units))

    def unpack(self, holder: Holder) -> torch.Tensor:
        """The unpack hook: gives autograd a saved tensor, replaying the unit if it is gone."""
        record = holder.record
        with record.lock:
            if record.serial != self._active_serial:
                self._come_to(record)
            if holder.tensor is None:
                holder.come_back()
            if holder.tensor is None:
                self._fill(record)
            return record.read(holder)

    def begin_replay(self, record: Record) -> None:
        """Counts a replay in backward of a record that has no holders to ask for it."""
        if record.serial != self._active_serial:
            self._come_to(record)
        self.counts.replays[record.name] += 1

    def wanted_after(self, error: RuntimeError) -> int | None:
        """Returns the bytes to evict before what failed is tried again, None if that is no use."""
        if is_out_of_memory(error) and self._in_order(spare_active=True):
            return requested_bytes(error)
        return None

    def _come_to(self, record: Record) -> None:
        self._active_serial = record.serial
        self.waiting.settle()
        if self.at_backward is not None:
            self.at_backward(record)
        if record.stash is not None:
            self._prefetch_before(record)

    def _prefetch_before(self, record: Record) -> None:
        earlier = [r for r in self.records() if r.stash is not None and r.serial < record.serial]
        if earlier:
            max(earlier, key=lambda r: r.serial).prefetch()

    def _fill(self, record: Record) -> None:
        self.counts.replays[record.name] += 1
        while True:
            try:
                replay(record)
                return
            except RuntimeError as error:
                if record.pinned is not None:
                    raise  # all ranks replay it, and none of the others would do so again
                if record.cache is not None:
                    wanted = 0  # its results are used up in part: compute everything again
                else:
                    asked = self.wanted_after(error)
                    if asked is None:
                        raise
                    wanted = asked
            record.cache = None
            # outside `except`, so that the failed replay is freed before the next one
            self.evict(wanted, spare_active=True)

    def _in_order(self, *, spare_active: bool) -> list[Record]:
        sizes = [(record, record.own_bytes()) for record in self.records()]
        held = [(record, size) for record, size in sizes if size and record.is_evictable]
        others = [(r, size) for r, size in held if r.serial != self._active_serial]
        if spare_active and (others or any(record.num_replays for record, _ in held)):
            held = others
        held.sort(key=lambda pair: (-_rate_class(*pair), pair[0].serial))
        return [record for record, _ in held if not (record.busy or record.leaves)]


def _rate_class(record: Record, size_bytes: int) -> int:
    # Bytes per recompute second in steps of sqrt(2): timing noise must not decide between equal
    # units. Among equals the oldest goes first, since backward needs it last. A record whose
    # forward still runs goes last: its seconds are unknown, and backward needs it first.
    if record.forward_seconds is None:
        return -sys.maxsize
    seconds = max(record.forward_seconds, 1e-6)
    return round(2 * math.log2(max(size_bytes, 1) / seconds))

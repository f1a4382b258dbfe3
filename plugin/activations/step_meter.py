"""Reads memory while a step runs, and splits it into what units keep and the working set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from rematic.activations.ledger import Ledger
from rematic.activations.record import Record
from rematic.activations.replay import replaying
from rematic.activations.unit_forward import is_recording

Phase: TypeAlias = Literal["unit", "head", "backward"]
"""Inside a unit's forward, outside the units, in backward."""


class StepMeter:
    """Highest readings of one step.

    Unwatched, memory is read where it is asked to, at the ends of units. Watched, it is read after
    every op as well, and the working set of forward and of backward is told apart from what the
    records hold.
    """

    def __init__(
        self,
        allocated_bytes: Callable[[], int | None],
        ledger: Ledger,
        *,
        before_bytes: int | None,
        gradient_bytes: Callable[[], int],
        watched: bool,
    ) -> None:
        self._allocated_bytes = allocated_bytes
        self._ledger = ledger
        self._gradient_bytes = gradient_bytes
        self._watched = watched
        self._resident_bytes = 0
        self._gradients_before = gradient_bytes() if watched else 0
        self._gradients_since = 0
        self._in_backward = False
        self.before_bytes = before_bytes
        """Bytes in use before the step, None if the probe cannot tell."""
        self.peak_bytes = self.before_bytes
        """Highest reading of the step."""
        self.kept: dict[tuple[str, str], int] = {}
        """Bytes held when a unit's forward ended, by name of unit and `keep` or `selective`."""
        self.staying_bytes = 0
        """Bytes among them that neither move nor are let go at once."""
        self.paused = False
        """Whether readings are left out: an optimizer updates in the middle of the step."""
        self._transients: dict[Phase, int] = {}

    def transient_bytes(self, phase: Phase) -> int | None:
        """Returns the working set of a phase; None if unwatched or the phase never came.

        That is the highest reading less what was in use before the step, what the records hold
        that are not at work, and the gradients that have appeared.
        """
        return self._transients.get(phase)

    def at_unit_end(self, record: Record, *, selective: bool = False) -> int | None:
        """Reads memory when a unit's forward has ended; returns the bytes in use.

        Args:
            record: What it saved.
            selective: Whether results of chosen ops are kept, none of them too.
        """
        if record.held or selective:
            key = (record.name, "keep" if record.held else "selective")
            num_bytes = record.own_bytes()
            self.kept[key] = self.kept.get(key, 0) + num_bytes
            self.staying_bytes += num_bytes - record.leaving_bytes()
        if self._watched:
            self._resident_bytes = self._ledger.resident_bytes()
            self._gradients_since = self._gradient_bytes() - self._gradients_before
        return self.read()

    def at_backward(self, record: Record) -> None:
        """Reads memory when backward comes to another record."""
        if self._watched:
            self._in_backward = True
            self._resident_bytes = self._ledger.resident_bytes()
            if record.held:
                self._resident_bytes -= record.own_bytes()  # falls from here on: working set
            self._gradients_since = self._gradient_bytes() - self._gradients_before
        self.read()

    def after_eviction(self) -> None:
        """Takes note that records hold less."""
        if self._watched:
            self._resident_bytes = self._ledger.resident_bytes()

    def read(self) -> int | None:
        """Reads memory; called after every op of a watched step. Returns the bytes in use."""
        allocated = self._allocated_bytes()
        if allocated is None or self.paused or (replaying() and not self._in_backward):
            return allocated  # (the safety check of a first call replays in forward)
        if self.peak_bytes is None or allocated > self.peak_bytes:
            self.peak_bytes = allocated
        if self._watched and self.before_bytes is not None:
            beside = self.before_bytes + self._resident_bytes + self._gradients_since
            phase: Phase = "backward" if self._in_backward else "head"
            if phase == "head" and is_recording():
                phase = "unit"
            transient = max(0, allocated - beside)
            self._transients[phase] = max(self._transients.get(phase, 0), transient)
        return allocated

"""A journal that lets the training go on where its disk takes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rematic.journal.events import EventSink

_log = logging.getLogger("rematic")


class SteadyJournal:
    """Passes events on to a sink; those that it cannot write are counted and told of.

    What was decided stands all the same. When the sink can be written again, a `notice` says how
    many events are missing before it, and `num_gaps` that what follows needs a new beginning.

    Args:
        sink: Where events go; errors other than `OSError` pass, and so does one at the first event,
            when somebody is there to choose another place.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._has_begun = False
        self._num_lost = 0
        self.num_gaps = 0
        """How often events were lost and the next ones were not."""

    @property
    def path(self) -> Path | None:
        """The file, if there is one."""
        return getattr(self._sink, "path", None)

    def write(self, event: Mapping[str, object]) -> None:
        """Records one event of plain values, if it can be."""
        try:
            if self._num_lost:
                self._sink.write(self._gap(event))
                self._num_lost, self.num_gaps = 0, self.num_gaps + 1
            self._sink.write(event)
            self._has_begun = True
        except OSError as error:
            if not self._has_begun:
                raise
            if not self._num_lost:
                _log.warning(
                    "the journal cannot be written: %s. The training goes on; what is decided "
                    "meanwhile is missing from it.",
                    error,
                )
            self._num_lost += 1

    def _gap(self, event: Mapping[str, object]) -> dict[str, object]:
        return {
            "event": "notice",
            "step": event.get("step"),
            "unit": "",
            "kind": "journal",
            "text": f"{self._num_lost} events before this one are missing: its disk took nothing",
            "figures": {"lost": self._num_lost},
        }

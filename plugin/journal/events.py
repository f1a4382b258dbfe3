"""What one line of a journal is: its schema, and which kinds of event must reach the disk.

Every line is one JSON object with `schema`, `time` (seconds since the epoch) and `event` (its
kind). The session writes `attach`, `step`, `evict`, `retry`, `notice`, `switch`, `rollback`, `pin`,
`unpin`, `agreement` and `stop`, its supervisor `control`, `decision`, `compare`, `release`,
`refused` and `request`; the runner writes `run_start`, `checkpoint` and `run_end`. A reader ignores
kinds and fields that it does not know: a new one does not change the schema, a changed meaning
does. No event holds environment variables or data samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

SCHEMA_VERSION = 1
"""Version of the meaning of the fields; a reader refuses every other one."""

DURABLE_KINDS = frozenset(
    {"switch", "rollback", "pin", "unpin", "request"}
    | {"checkpoint", "stop", "run_start", "run_end"}
)
"""Kinds that are forced to the disk when they are written: losing one misleads whoever resumes."""

HEADER_FIELDS = ("schema", "time", "event")
"""What the writer puts on every line; an event itself brings only `event`."""

FILE_NAME = "journal.jsonl"
"""Name of the journal inside a run directory."""


class JournalError(ValueError):
    """A journal that cannot be written or read as it is."""


class EventSink(Protocol):
    """Where a session or a runner puts its events."""

    def write(self, event: Mapping[str, object]) -> None:
        """Records one event of plain values."""

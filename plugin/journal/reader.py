"""Reads a journal back, also one whose process was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rematic.journal.events import FILE_NAME, HEADER_FIELDS, SCHEMA_VERSION, JournalError
from rematic.journal.parts import closed_parts


def find_journal(run: str | Path) -> Path:
    """The journal file of a run.

    Args:
        run: A run directory, or the journal file itself.

    Raises:
        JournalError: There is no journal.
    """
    path = Path(run)
    journal = path / FILE_NAME if path.is_dir() else path
    if journal.is_file():
        return journal
    what = f"it holds no {FILE_NAME}" if path.is_dir() else "there is no such file or directory"
    raise JournalError(f"{run} is not a run: {what}; expected a run directory{_nearby_runs(path)}")


def read_journal(path: str | Path) -> Iterator[dict[str, object]]:
    """Yields the events of a journal in the order in which they were written.

    A last line without its line end is what a killed process leaves: it is skipped. Anything
    else that is not an event is an error.

    Args:
        path: The journal file; its closed parts are read before it.

    Yields:
        One event with its header.

    Raises:
        JournalError: A line is damaged, or has a schema that this version does not read.
    """
    # opened first: a writer may close it while its parts are read, and it is a part itself then
    with open(path, "rb") as last:
        now = os.fstat(last.fileno())
        for part in closed_parts(Path(path)):
            with open(part, "rb") as file:
                if not os.path.samestat(now, os.fstat(file.fileno())):
                    yield from _events(file, part)
        yield from _events(last, Path(path))


def _events(file: BinaryIO, path: Path) -> Iterator[dict[str, object]]:
    for number, line in enumerate(file, start=1):
        if line.endswith(b"\n"):
            yield parse_line(line, where=f"{path}, line {number}")


def parse_line(line: bytes, *, where: str) -> dict[str, object]:
    """Returns the event of one line.

    Args:
        line: The line with its end.
        where: Names it in an error.

    Raises:
        JournalError: It is damaged, or has a schema that this version does not read.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JournalError(
            f"{where} is not JSON ({error}); expected one event per line, as rematic writes them: "
            "restore the file, or cut it before this line"
        ) from None
    if not isinstance(event, dict) or any(field not in event for field in HEADER_FIELDS):
        raise JournalError(f"{where} is not an event: expected an object with schema, time, event")
    if event["schema"] != SCHEMA_VERSION:
        raise JournalError(
            f"{where} has schema {event['schema']!r}; this version of rematic reads schema "
            f"{SCHEMA_VERSION}: read it with the version that wrote it"
        )
    if not isinstance(event["event"], str) or not isinstance(event["time"], (int, float)):
        raise JournalError(
            f"{where} is not an event: expected a kind as a word and seconds as a number, got "
            f"{event['event']!r} and {event['time']!r}"
        )
    return event


def _nearby_runs(path: Path) -> str:
    """Names the runs a person may have meant, newest first."""
    folder = path if path.is_dir() else path.parent
    journals = sorted(folder.glob(f"*/{FILE_NAME}"), key=lambda p: p.stat().st_mtime, reverse=True)
    names = ", ".join(str(journal.parent) for journal in journals[:5])
    return f"; there are: {names}" if names else ""

"""Reads the events of a run that a command was given."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from rematic.journal import JournalError, find_journal, missing_parts, read_journal

_PARTS_NAMED = 5


def events_of_run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns the events of the run under `run_path`, one by one; a long run has many.

    Says on the error stream if parts of the journal are gone.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    journal = find_journal(arguments.run_path)
    missing = missing_parts(journal)
    if missing:
        names = ", ".join(part.name for part in missing[:_PARTS_NAMED])
        more = " and more" if len(missing) > _PARTS_NAMED else ""
        print(
            f"rematic: {journal} lacks its parts {names}{more}: what is told is of the others",
            file=sys.stderr,
        )
    events: Iterator[dict[str, Any]] = iter(read_journal(journal))
    first = next(events, None)
    if first is None:
        raise JournalError(
            f"{journal} holds no event; expected at least the start of a run: it was killed before "
            "it began, train it again"
        )
    return itertools.chain([first], events)


@contextlib.contextmanager
def naming_damage(arguments: argparse.Namespace) -> Iterator[None]:
    """Says that a journal is damaged where an event lacks what is read of it.

    Raises:
        JournalError: It is.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{arguments.run_path}: an event of the journal is damaged ({type(error).__name__}: "
            f"{error}); expected what rematic writes, of the version that reads it: restore the "
            "journal"
        ) from error

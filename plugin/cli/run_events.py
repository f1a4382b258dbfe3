"""Reads the events of a run that a command was given."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from rematic.journal import JournalError, find_journal, read_journal


def events_of_run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns all events of the run under `run_path`.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    journal = find_journal(arguments.run_path)
    events: list[dict[str, Any]] = list(read_journal(journal))
    if not events:
        raise JournalError(
            f"{journal} holds no event; expected at least the start of a run: it was killed before "
            "it began, train it again"
        )
    return events


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

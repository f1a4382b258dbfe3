"""Reads the events of a run that a command was given."""

from __future__ import annotations

import argparse
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

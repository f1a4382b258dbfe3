"""`rematic report RUN`."""

from __future__ import annotations

import argparse
import json

from rematic.cli.exit_codes import DONE
from rematic.journal import JournalError, find_journal, format_summary, read_journal, summarize


def run_report(arguments: argparse.Namespace) -> int:
    """Prints what a run did.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    journal = find_journal(arguments.run_path)
    events = list(read_journal(journal))
    if not events:
        raise JournalError(
            f"{journal} holds no event; expected at least the start of a run: it was killed before "
            "it began, train it again"
        )
    summary = summarize(events)
    if arguments.json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        print(format_summary(summary))
    return DONE

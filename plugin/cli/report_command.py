"""`rematic report RUN`."""

from __future__ import annotations

import argparse
import json

from rematic.cli.exit_codes import DONE
from rematic.cli.run_events import events_of_run
from rematic.journal import format_summary, summarize


def run_report(arguments: argparse.Namespace) -> int:
    """Prints what a run did.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    summary = summarize(events_of_run(arguments))
    if arguments.json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        print(format_summary(summary))
    return DONE

"""`rematic audit RUN`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rematic import control
from rematic.cli.exit_codes import DONE, FAILED
from rematic.cli.run_events import events_of_run
from rematic.control import AuditReport

MAX_LINES = 20
"""Differences that are printed; `--json` has all of them."""


def run_audit(arguments: argparse.Namespace) -> int:
    """Decides everything again from a journal; fails if anything differs.

    Raises:
        JournalError: There is no run, or its journal is damaged or empty.
    """
    report = control.audit(events_of_run(arguments))
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(_text(report))
    return FAILED if report.differences else DONE


def _text(report: AuditReport) -> str:
    lines = [
        f"{report.num_steps} steps and {report.num_decisions} decisions were decided again from "
        f"their figures, {len(report.differences)} differences"
    ]
    if report.num_retried:
        lines.append(
            f"{report.num_retried} of the steps ran again as a whole: their plans are those of the "
            "last attempt and were not compared"
        )
    if report.num_modelled:
        lines.append(
            f"{report.num_modelled} of the steps were planned from a trace of the model, which is "
            "not in the journal: their plans were not compared"
        )
    if report.num_unaudited:
        lines.append(
            f"{report.num_unaudited} steps could not be audited: the journal lacks what they were "
            "decided from, or lines before them"
        )
    lines += [
        f"step {one.step}, {one.field}: the journal says {one.written!r}, the figures lead to "
        f"{one.decided!r}"
        for one in report.differences[:MAX_LINES]
    ]
    return "\n".join(lines)

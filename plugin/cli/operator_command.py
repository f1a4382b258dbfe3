"""`rematic rollback | pin | unpin RUN`: asks a running job, and waits for its answer."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rematic.cli.exit_codes import DONE, FAILED
from rematic.journal import JournalError, JournalTail, find_journal
from rematic.operator_requests import append_request

LOOK_SECONDS = 0.2
"""The journal is looked at so often for an answer."""
_LAST_BYTES = 1 << 16


def run_request(arguments: argparse.Namespace) -> int:
    """Appends a request to a run's file and prints the answer.

    Raises:
        JournalError: There is no run, or it has ended.
    """
    journal = find_journal(arguments.run_path)
    _refuse_an_ended_run(journal)
    fields = {
        name: value
        for name in ("policy", "steps", "reason")
        if (value := getattr(arguments, name, None)) is not None
    }
    with contextlib.closing(JournalTail(journal)) as tail:
        request_id = append_request(journal.parent, arguments.request, **fields)
        answer = _wait(tail, request_id, seconds=arguments.wait)
    if arguments.json:
        print(json.dumps({"id": request_id, "answer": answer}, indent=2))
    else:
        print(_text(answer, journal.parent, seconds=arguments.wait))
    return DONE if answer is not None and answer["status"] == "accepted" else FAILED


def _refuse_an_ended_run(journal: Path) -> None:
    with open(journal, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
        last = file.read().splitlines()[-1:]
    try:
        event = json.loads(last[0]) if last else None
    except ValueError:  # a line that is still being written: it runs
        return
    if isinstance(event, dict) and event.get("event") == "run_end":
        run = journal.parent
        raise JournalError(
            f"{run} has ended ({event.get('status')}); expected a running job: "
            f"`rematic train RECIPE --resume {run}` goes on with it"
        )


def _wait(tail: JournalTail, request_id: str, *, seconds: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + seconds
    while True:
        for event in tail.read():
            if event["event"] == "request" and event.get("id") == request_id:
                return event
        if time.monotonic() >= deadline:
            return None
        time.sleep(LOOK_SECONDS)


def _text(answer: dict[str, Any] | None, run: Path, *, seconds: float) -> str:
    if answer is None:
        return (
            f"no answer from {run} in {seconds:g} seconds. Does it run? It answers after an "
            "optimizer step; a request is granted for 10 minutes, `rematic status` shows whether "
            "it was."
        )
    return f"{answer['status']} before step {answer['step']}: {answer['reason']}"

"""`rematic rollback | pin | unpin RUN`: asks a running job, and waits for its answer."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from rematic.cli.exit_codes import DONE, FAILED
from rematic.journal import JournalTail, find_journal
from rematic.operator_requests import append_request

LOOK_SECONDS = 0.2
"""The journal is looked at so often for an answer."""


def run_request(arguments: argparse.Namespace) -> int:
    """Appends a request to a run's file and prints the answer.

    Raises:
        JournalError: There is no run.
    """
    journal = find_journal(arguments.run_path)
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

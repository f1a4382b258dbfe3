"""Runs the demo: the same documents under one memory budget, kept, recomputed and by rematic."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import IO

from rematic.training.demo_figures import (
    KEPT,
    PLAIN,
    DemoFigures,
    DocumentFigures,
    Failure,
    compare,
)
from rematic.training.environment import training_environment

RECIPE = "tiny-cpu"
"""The recipe that the demo trains."""

SETTINGS = ("data.max_length=512", "memory.budget=408MiB")
"""What the demo changes of the recipe. The longest document needs about 346 MiB recomputed and 480
MiB kept, so the budget lies half way; all parts together take some five minutes on two cores.
"""

PARTS = {
    PLAIN: "plain loop, no cap",
    KEPT: "(a) everything kept, capped",
    "compared": "(b) everything recomputed and (c) rematic, capped",
}
"""The processes, in order, and what they show."""

COMMAND = (sys.executable, "-m", "rematic.training.demo_child")
"""Runs one part."""

TICK_SECONDS = 1.0
"""How often the progress is told while nothing happens."""

Message = Mapping[str, object]
Show = Callable[[str], None]


@dataclass
class Findings:
    """What the parts have told so far."""

    work: Message = field(default_factory=dict)
    documents: dict[str, list[DocumentFigures]] = field(default_factory=dict)
    failures: dict[str, list[Failure]] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Takes one message of a part.

        Raises:
            ValueError: The part refuses what the user gave.
        """
        kind, figures, way = message["kind"], message.get("figures"), str(message.get("way"))
        if kind == "refused":
            raise ValueError(str(message["message"]))
        if kind == "work":
            self.work = message
        elif kind == "document" and isinstance(figures, dict):
            self.documents.setdefault(way, []).append(DocumentFigures(**figures))
        elif kind == "failure" and isinstance(figures, dict):
            self.failures.setdefault(way, []).append(Failure(**figures))


def run_demo(overrides: Sequence[str] = (), *, show: Show, recipe: str = RECIPE) -> DemoFigures:
    """Trains the documents each way and compares.

    Args:
        overrides: `key=value` texts that change the recipe, its budget for one.
        show: Is given a line of progress every second or so.
        recipe: The recipe to train.

    Raises:
        ValueError: The recipe cannot be used.
        RuntimeError: A part died in another way than it was meant to.
    """
    findings = Findings()
    for number, (part, title) in enumerate(PARTS.items(), start=1):
        head, news = f"[{number}/{len(PARTS)}] {title}", "starting"
        with closing(_follow([part, recipe, *SETTINGS, *overrides])) as messages:
            for seconds, message in messages:
                if message is not None:
                    findings.add(message)
                    news = _describe(findings, message)
                show(f"{head}: {news} ({seconds:.0f} s)")
    return _compare(findings)


def _compare(findings: Findings) -> DemoFigures:
    work = findings.work
    lengths, budget, max_length = (work[key] for key in ("lengths", "budget_bytes", "max_length"))
    assert isinstance(lengths, list)  # as demo_child tells it
    assert isinstance(budget, int)
    assert isinstance(max_length, int)
    return compare(
        findings.documents,
        findings.failures,
        lengths=lengths,
        max_length=max_length,
        budget_bytes=budget,
        corpus_sha256=str(work["corpus_sha256"]),
    )


def _describe(findings: Findings, message: Message) -> str:
    figures = message.get("figures")
    if not isinstance(figures, dict):
        return "loading the model"
    lengths = findings.work.get("lengths")
    total = len(lengths) if isinstance(lengths, list) else 0
    place = f"document {figures['number'] + 1} of {total}, {figures['length']:,} tokens"
    if message["kind"] == "failure":
        return f"{place}: failed: {figures['error'][:60]}"
    return f"{place}, loss {float.fromhex(figures['loss_hex']):.3f}, {message['way']}"


def _follow(arguments: Sequence[str]) -> Generator[tuple[float, Message | None], None, None]:
    """Runs one part and yields its messages with the seconds since it began; None while it works.

    Raises:
        RuntimeError: It died.
    """
    started_seconds = time.monotonic()
    with _part(arguments) as (process, lines):
        while (line := _next_line(lines)) is not None:
            yield time.monotonic() - started_seconds, json.loads(line) if line else None
        process.wait()


def _next_line(lines: Queue[str | None]) -> str | None:
    """The next line of a part, empty if none came for a second; None when there are no more."""
    try:
        return lines.get(timeout=TICK_SECONDS)
    except Empty:
        return ""


@contextmanager
def _part(
    arguments: Sequence[str],
) -> Iterator[tuple[subprocess.Popen[str], Queue[str | None]]]:
    """One process of the demo and the lines it prints; it never outlives the block."""
    command = [*COMMAND, *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=training_environment(),
        )
        lines: Queue[str | None] = Queue()
        assert process.stdout is not None  # it is a pipe
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield process, lines
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(_post_mortem(arguments[0], process.returncode, errors.read()))


def _read(stream: IO[str], lines: Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _post_mortem(part: str, code: int, errors: str) -> str:
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    tail = "\n".join(errors.strip().splitlines()[-15:])
    return f"the part {part!r} of the demo ended {how}; it was expected to finish:\n{tail}"

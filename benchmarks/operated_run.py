"""Two ways back on a running job: a gate takes a slow policy back, and an operator one at will.

A child process trains `tiny-cpu` under a real heap cap with its journal in a run directory. After
some steps a policy is put in force whose forwards sleep; its slow-down gate must take it back
within the probation. Then another one is put in force, and `rematic rollback RUN`, run in a process
of its own as from another terminal, must take that back at the next boundary.

    .venv/bin/python benchmarks/operated_run.py --json

Linux with glibc 2.33. The tests run it with two layers (tests/test_operated_run.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rematic.byte_sizes import parse_bytes
from rematic.journal import FILE_NAME, JournalTail, JournalWriter, read_journal
from rematic.memory import capped_heap, use_mapping_malloc, warm_up_threads
from rematic.training.environment import training_environment

SLOW, CALM = "recompute", "selective"
"""The policy that is slow, and the one that the operator takes back."""

SLOW_AT = 8
"""Step at which the slow one comes."""

CALM_AT = 24
"""Step at which the other one comes; the probation of the first is over."""

MAX_STEPS = 4000
"""Steps after which the child gives up waiting for the operator."""

SLOWER = 4
"""How many times as long as before a slow forward sleeps."""

Event = dict[str, Any]


class Notes:
    """A journal that is also kept in memory."""

    def __init__(self, writer: JournalWriter) -> None:
        self.path = writer.path
        self.events: list[Event] = []
        self._writer = writer

    def write(self, event: Any) -> None:  # noqa: ANN401 - what a journal takes
        """Takes one event."""
        self._writer.write(event)
        self.events.append(dict(event))

    def last(self, kind: str) -> Event | None:
        """Returns the last event of a kind."""
        return next((e for e in reversed(self.events) if e["event"] == kind), None)


def train(folder: Path, options: argparse.Namespace) -> None:
    """What the child does."""
    import torch

    import rematic
    from rematic.recipes import GoalsConfig, Recipe, load_recipe
    from rematic.training.batches import make_batch
    from rematic.training.plain_loop import PlainLoop

    torch.set_num_threads(1)
    recipe = load_recipe("tiny-cpu", (f"model.config.num_hidden_layers={options.layers}",))
    loop = PlainLoop(recipe, max_length=options.tokens)
    journal = Notes(JournalWriter(folder / FILE_NAME))
    cap = parse_bytes(options.cap)
    session = rematic.attach(
        loop.model,
        loop.optimizer,
        recipe=Recipe(goals=GoalsConfig(slowdown_max=2.0)),
        policy="keep",
        budget=loop.idle_bytes + cap,
        probe="host",
        journal=journal,
    )

    def sleep(module: object, args: object) -> None:
        if session.policy.name == SLOW:
            steps = (e for e in journal.events if e["event"] == "step")
            usual = [e["seconds"] for e in steps if e["policy"] == "keep"]
            time.sleep(SLOWER * max(usual))

    loop.model.register_forward_pre_hook(sleep)
    batch = make_batch([i % 256 for i in range(options.tokens)])
    warm_up_threads()
    with capped_heap(cap):
        for number in range(MAX_STEPS):
            if number in (SLOW_AT, CALM_AT):
                session.switch(SLOW if number == SLOW_AT else CALM, reason="injected")
            loop.start_document(number)
            session.run(loop.forward_backward, batch)
            loop.update()
            asked = journal.last("request")
            if asked is not None and number > asked["step"] + 2:
                return


def operate(folder: Path, child: subprocess.Popen[bytes]) -> str:
    """Waits until the second policy is in force, and takes it back as an operator does."""
    while not (folder / FILE_NAME).exists():
        _check(child)
    with contextlib.closing(JournalTail(folder / FILE_NAME)) as tail:
        while not any(e["event"] == "step" and e["policy"] == CALM for e in tail.read()):
            _check(child)
    command = [sys.executable, "-m", "rematic.cli", "rollback", str(folder), "--reason", "too slow"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _check(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        raise RuntimeError(f"the training ended with {child.returncode} before it was asked for")
    time.sleep(0.05)


def findings(events: Iterable[Event]) -> dict[str, Any]:
    """Returns when each policy came and went, by the journal."""
    written = list(events)
    by_gate, by_hand = (e for e in written if e["event"] == "rollback")
    decision = next(e for e in written if e["event"] == "decision" and e["change"] == "rollback")
    (request,) = (e for e in written if e["event"] == "request")
    steps = {e["step"]: e["policy"] for e in written if e["event"] == "step"}
    slow = [number for number, policy in steps.items() if policy == SLOW]
    calm = [number for number, policy in steps.items() if policy == CALM]
    return {
        "gates_missed": [g["name"] for g in decision["gates"] if g["passed"] is False],
        "slow_steps": len(slow),
        "slow_until": max(slow),
        "rolled_back_before": by_gate["step"],
        "policy_after": steps[by_gate["step"]],
        "request": request["status"],
        "request_before": request["step"],
        "calm_until": max(calm),
        "taken_back_before": by_hand["step"],
        "policy_in_the_end": steps[max(steps)],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, operates, and reads what happened.

    Raises:
        RuntimeError: If the training ends early.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--child", name, "--cap", options.cap]
        command += ["--layers", str(options.layers), "--tokens", str(options.tokens)]
        child = subprocess.Popen(command, env=training_environment())
        try:
            answer = operate(folder, child)
            child.wait()
        finally:
            child.kill()
            child.wait()
        written = read_journal(folder / FILE_NAME)
        return {**findings(written), "answer": answer.strip(), "ended_with": child.returncode}


def arguments_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cap", default="160MiB", help="over weights and optimizer state")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Prints what happened; 1 if a policy was not taken back in time."""
    options = arguments_of(arguments)
    if options.child is not None:
        use_mapping_malloc()  # before torch allocates anything
        train(options.child, options)
        return 0
    found = run(options)
    print(json.dumps(found) if options.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    in_time = found["slow_steps"] <= 8 and found["request_before"] == found["taken_back_before"]
    return int(not in_time or found["policy_in_the_end"] != "keep")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How many steps a second the controller decides about.

    python benchmarks/control_decisions.py
    python benchmarks/control_decisions.py --decisions 20000 --json

Decisions are pure, so this runs on paper: feeds of observations, made beforehand, go through
`rematic.control.decide`, and what it decides is in force from the next one on. Seconds are those
of the processor that this process got, the fastest of some rounds; the wall's are printed too.

The last row is of real steps of a small model with a journal on disk: everything that control does
beside forward and backward, which is reading the event, deciding, writing both to the journal and
looking for an operator's requests. The median step counts; the bar is 0.2 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rematic.control import ControllerState, ControlRules, Observation, decide, observe

BAR = 100_000
"""Decisions per second that are aimed at."""

STEP_BAR_MICROSECONDS = 200
"""Time of control in a real step that is aimed at."""

LADDER = ("keep", "selective", "recompute", "recompute+offload")
CAPACITY = 10_000

Feed = list[Observation]


def make_step(
    step: int, tokens: int, *, peak: int, seconds: float, evicted: int = 0
) -> Observation:
    """Returns a step under the lightest policy."""
    return Observation(
        step=step,
        tokens=tokens,
        length=tokens,
        seconds=seconds,
        policy="keep",
        limit_bytes=CAPACITY,
        peak_bytes=peak,
        evicted_bytes=evicted,
        in_use_bytes=1000,
        reserved_bytes=peak,
        hole_bytes=0,
        capacity_bytes=CAPACITY,
        num_alloc_retries=0,
        num_ooms=0,
    )


def quiet(number: int) -> Feed:
    """Lengths that vary and always fit."""
    draw = random.Random(0)
    lengths = [draw.randint(16, 1000) for _ in range(number)]
    return [make_step(i, n, peak=1000 + 8 * n, seconds=n * 1e-4) for i, n in enumerate(lengths)]


def rare_long(number: int) -> Feed:
    """Now and then a batch that fits by evicting only."""
    steps = quiet(number)
    for i in range(11, number, 12):
        steps[i] = make_step(i, 1300, peak=9400, seconds=0.2, evicted=2000)
    return steps


def always_short(number: int) -> Feed:
    """Memory that is never enough: switches, probations, questions."""
    return [make_step(i, 1200, peak=9900, seconds=0.2) for i in range(number)]


FEEDS: dict[str, Callable[[int], Feed]] = {
    "quiet": quiet,
    "rare long batches": rare_long,
    "memory always short": always_short,
}


def run(feed: Feed) -> int:
    """Decides about every step; returns the number of changes."""
    state, rules = ControllerState(), ControlRules(ladder=LADDER)
    policies, changes = ["keep"], 0
    for seen in feed:
        if len(policies) > 1:
            seen = seen._replace(policy=policies[-1], depth=len(policies) - 1)
        state, decision = decide(state, seen, rules)
        if decision.change == "switch":
            policies.append(decision.policy)
        elif decision.change == "rollback":
            policies.pop()
        changes += decision.change != "none"
    return changes


def measure(num_decisions: int, rounds: int) -> list[dict[str, object]]:
    """Returns a row for each feed, and one for reading the events that feeds are made of."""
    rows = []
    for name, make in FEEDS.items():
        feed, found = make(num_decisions), []
        for _ in range(rounds):
            processor, wall = time.process_time(), time.perf_counter()
            changes = run(feed)
            found.append((time.process_time() - processor, time.perf_counter() - wall))
        row = {"feed": name, "decisions": num_decisions, "changes": changes}
        rows.append(row | _rates(num_decisions, found))
    return [*rows, _reading(num_decisions, rounds)]


def _reading(number: int, rounds: int) -> dict[str, object]:
    event = {"step": 1, "tokens": 512, "length": 512, "seconds": 0.1, "policy": "keep"}
    event |= {"budget_bytes": 9000, "peak_bytes": 5000, "after": {"capacity_bytes": CAPACITY}}
    found = []
    for _ in range(rounds):
        processor, wall = time.process_time(), time.perf_counter()
        for _ in range(number):
            observe(event)
        found.append((time.process_time() - processor, time.perf_counter() - wall))
    row: dict[str, object] = {"feed": "reading a step's event", "decisions": number, "changes": 0}
    return row | _rates(number, found)


def measure_real_steps(num_steps: int) -> dict[str, object]:
    """Returns what control and journal take in steps of a training, in microseconds."""
    import torch
    from torch import nn

    import rematic
    from rematic.journal import FILE_NAME, JournalWriter

    torch.set_num_threads(1)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = JournalWriter(Path(folder) / FILE_NAME)
        session = rematic.attach(model, optimizer, policy="keep", journal=journal)
        for part, name in (
            (session.supervisor, "before_step"),
            (session.supervisor, "after_step"),
            (session.supervisor, "at_boundary"),
            (journal, "write"),
        ):
            setattr(part, name, _timed(getattr(part, name), took))
        totals = []
        for _ in range(num_steps):
            took.clear()
            with session.step(torch.ones(4, 16)):
                model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
            totals.append(sum(took))
        session.detach()
        journal.close()
    return {
        "feed": "a real step",
        "decisions": num_steps,
        "microseconds": round(statistics.median(totals[num_steps // 10 :]) * 1e6, 2),
        "microseconds_min": round(min(totals) * 1e6, 2),
    }


def _timed(call: Callable[..., object], took: list[float]) -> Callable[..., object]:
    """Notes the processor's time of the outermost calls."""
    depth = 0

    def timed(*args: object, **kwargs: object) -> object:
        nonlocal depth
        started, depth = time.thread_time(), depth + 1
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1
            if depth == 0:
                took.append(time.thread_time() - started)

    return timed


def _rates(number: int, found: list[tuple[float, float]]) -> dict[str, object]:
    processor, wall = min(f[0] for f in found), min(f[1] for f in found)
    return {
        "per_second": round(number / processor),
        "microseconds": round(processor / number * 1e6, 2),
        "per_second_by_the_wall": round(number / wall),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.decisions, arguments.rounds)
    real = measure_real_steps(max(100, arguments.decisions // 200))
    if arguments.json:
        bars = {"bar_per_second": BAR, "bar_microseconds_per_step": STEP_BAR_MICROSECONDS}
        print(json.dumps({**bars, "rows": [*rows, real]}, indent=2))
        return
    for row in rows:
        print(
            f"{row['feed']:24} {row['per_second']:>9,} per second, {row['microseconds']} us "
            f"({row['per_second_by_the_wall']:,} by the wall), {row['changes']} changes"
        )
    print(
        f"{real['feed']:24} {real['microseconds']} us, the median of {real['decisions']} steps; "
        f"at least {real['microseconds_min']} us"
    )


if __name__ == "__main__":
    main()

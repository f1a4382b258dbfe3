"""How many steps a second the controller decides about.

    python benchmarks/control_decisions.py
    python benchmarks/control_decisions.py --decisions 20000 --json

Decisions are pure, so this runs on paper: feeds of observations, made beforehand, go through
`rematic.control.decide`, and what it decides is in force from the next one on. Seconds are those
of the processor that this process got, the fastest of some rounds; the wall's are printed too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from rematic.control import ControllerState, ControlRules, Observation, decide, observe

BAR = 100_000
"""Decisions per second that are aimed at."""

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
    if arguments.json:
        print(json.dumps({"bar_per_second": BAR, "rows": rows}, indent=2))
        return
    for row in rows:
        print(
            f"{row['feed']:24} {row['per_second']:>9,} per second, {row['microseconds']} us "
            f"({row['per_second_by_the_wall']:,} by the wall), {row['changes']} changes"
        )


if __name__ == "__main__":
    main()

"""How near the planner comes to the best plan, how fast, and what sums of bytes alone lose.

    .venv/bin/python benchmarks/planner.py --json

Stacks of 32 to 126 blocks with 7 actions each, 12 budgets from the smallest to that of keeping
everything. The truth is brute force up to 10 blocks, then an integer program with a time limit: its
proven bound, where it does not finish. Needs scipy; takes some minutes.

Beside it, on the same inputs, other planners (`planner_peers.py`): the knapsacks of torch's
compiler and `ckptplan` know only a sum of bytes, torch's `sac_milp` backward alone. Each is given,
for each budget, the largest budget of its own whose plan stays within it by the same peak formula,
which nobody who uses it could know.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import scipy
from planner_peers import Peer, peers
from planner_problems import budgets, keep_or_recompute, kept_seconds, stack

from rematic.planner import Problem, best_of_all, peak_of, seconds_of, solve
from rematic.planner.milp import solve_exactly

GAP_BAR, SECONDS_BAR = 1.01, 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem and budget."""

    num_units: int
    seed: int
    budget: int
    """Position among the budgets, from the smallest."""
    truth: str
    """What the plan is compared with: `brute force`, `optimum`, or `bound` where it is unproved."""
    gap: float
    """Seconds of the step over those of the truth."""
    extra_gap: float | None
    """The same for the seconds beyond keeping everything; None where the truth has none."""
    seconds: float
    """CPU time of the planner."""


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One problem and budget, planned by another planner."""

    peer: str
    num_units: int
    budget: int
    peer_seconds: float | None
    """Seconds of its step over those of the planner's with the same actions; None: nothing fits."""
    full_seconds: float | None
    """The same over the planner's with all actions."""


def main() -> int:
    """Prints the figures; 1 if a bar is missed."""
    arguments = _arguments()
    with _solver_talks_to_stderr():
        rows = list(_rows(arguments))
        peers = list(_peer_rows(arguments)) if not arguments.no_peers else []
    gaps = [row.extra_gap for row in rows if row.extra_gap is not None]
    result = {
        "gap_max": max(row.gap for row in rows),
        "gap_median": float(np.median([row.gap for row in rows])),
        "extra_gap_max": max(gaps),
        "extra_gap_median": float(np.median(gaps)),
        "seconds_max": max(row.seconds for row in rows),
        "seconds_median": float(np.median([row.seconds for row in rows])),
        "unproved": sum(row.truth == "bound" for row in rows),
        "peers": _summary(peers),
        "scipy": scipy.__version__,
        "rows": [asdict(row) for row in rows],
        "peer_rows": [asdict(row) for row in peers],
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for row in (*rows, *peers):
            print("  ".join(f"{key} {value}" for key, value in asdict(row).items()))
        print({key: value for key, value in result.items() if not key.endswith("rows")})
    return int(result["gap_max"] > GAP_BAR or result["seconds_max"] > SECONDS_BAR)


@contextlib.contextmanager
def _solver_talks_to_stderr() -> Iterator[None]:
    """Keeps what the solver prints from C++, past `sys.stdout`, out of the figures."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for num_units in arguments.units:
        for seed in range(arguments.seeds):
            problem = stack(num_units, seed=seed, num_actions=4 if num_units <= 10 else 7)
            for j, budget in enumerate(budgets(problem, arguments.budgets)):
                yield measure(
                    problem, budget_bytes=budget, j=j, seed=seed, limit=arguments.time_limit
                )


def measure(problem: Problem, *, budget_bytes: int, j: int, seed: int, limit: float) -> Row:
    """Plans once, checks the plan by the formula, and compares it with the truth."""
    started = time.process_time()
    solution = solve(problem, budget_bytes=budget_bytes)
    seconds = time.process_time() - started
    assert solution.fits, "every budget of this benchmark is enough"
    assert peak_of(problem, solution.assignment).total <= budget_bytes
    truth, best = _truth(problem, budget_bytes, limit)
    whole = kept_seconds(problem)
    return Row(
        num_units=len(problem.units),
        seed=seed,
        budget=j,
        truth=truth,
        gap=(whole + solution.seconds) / (whole + best),
        extra_gap=solution.seconds / best if best > 1e-9 else None,
        seconds=seconds,
    )


def _truth(problem: Problem, budget_bytes: int, limit: float) -> tuple[str, float]:
    if len(problem.units) <= 10:
        best = best_of_all(problem, budget_bytes=budget_bytes)
        assert best is not None
        return "brute force", seconds_of(problem, best)
    answer = solve_exactly(problem, budget_bytes=budget_bytes, time_limit_seconds=limit)
    if answer.is_proved and answer.assignment is not None:
        return "optimum", seconds_of(problem, answer.assignment)
    return "bound", answer.bound_seconds


def _peer_rows(arguments: argparse.Namespace) -> Iterator[PeerRow]:
    for num_units in (n for n in arguments.units if n > 10):
        full = stack(num_units, seed=0)
        problem = keep_or_recompute(full)
        for j, budget in list(enumerate(budgets(problem, arguments.budgets)))[1:-1:3]:
            whole = kept_seconds(problem)
            ours = whole + solve(problem, budget_bytes=budget).seconds
            with_all = whole + solve(full, budget_bytes=budget).seconds
            for name, peer, tries in peers():
                found = _best_by_sum(problem, peer, budget_bytes=budget, tries=tries)
                yield PeerRow(
                    peer=name,
                    num_units=num_units,
                    budget=j,
                    peer_seconds=None if found is None else (whole + found) / ours,
                    full_seconds=None if found is None else (whole + found) / with_all,
                )


def _best_by_sum(problem: Problem, peer: Peer, *, budget_bytes: int, tries: int) -> float | None:
    """Returns the least seconds of a peer's plans that the peak formula lets pass."""
    best: float | None = None
    for step in range(tries):
        assignment = peer(problem, step / (tries - 1))
        if assignment is None or peak_of(problem, assignment).total > budget_bytes:
            continue
        found = seconds_of(problem, assignment)
        best = found if best is None else min(best, found)
    return best


def _summary(peers: list[PeerRow]) -> dict[str, dict[str, float]]:
    summary = {}
    for name in dict.fromkeys(row.peer for row in peers):
        found = [row for row in peers if row.peer == name and row.peer_seconds is not None]
        summary[name] = {
            "same_actions_median": float(np.median([row.peer_seconds or 0 for row in found])),
            "same_actions_max": max(row.peer_seconds or 0 for row in found),
            "all_actions_median": float(np.median([row.full_seconds or 0 for row in found])),
        }
    return summary


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures alone, for scripts")
    parser.add_argument("--units", type=int, nargs="+", default=[6, 10, 32, 48, 80, 126])
    parser.add_argument("--seeds", type=int, default=2, help="problems of each size")
    parser.add_argument("--budgets", type=int, default=12, help="budgets of each problem")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds per integer program")
    parser.add_argument("--no-peers", action="store_true", help="leave other planners out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""What plans are worth on documents of varying length, by the model of the step alone.

    .venv/bin/python benchmarks/plan_lengths.py --json

Nothing is trained: a step of each length is traced, planned and judged. The model is that of
tiny-cpu with 8 blocks; the budget lies between recomputing and keeping everything at the longest
document. A plan is made for a bucket of lengths, and its time is that at the document's own length.
It is compared with the optimum of an integer program at that length, with recomputing everything,
and with the best fixed mix of actions that survives the longest document: of everything kept, a
list of ops and everything recomputed, and of rematic's own op sets. Needs scipy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from rematic.cost import StepProfile, trace_recipe
from rematic.cost.calibrate import local_cpu
from rematic.cost.devices import REFERENCE_CPU
from rematic.cost.roofline import pace_of
from rematic.planner import (
    Option,
    Pace,
    Problem,
    length_of_bucket,
    problem_of,
    propose,
    rise_of,
    seconds_of,
)
from rematic.planner.forecast import BACKWARD_FORWARDS, forward_seconds
from rematic.planner.frontier import listed_option
from rematic.planner.milp import solve_exactly
from rematic.policy import Action, Keep, Recompute
from rematic.recipes import DataConfig, load_recipe
from rematic.training.corpus import load_corpus

LONGEST = 2048
ALLOWED = ("keep", "selective", "recompute")
SHORTEST, NUM_DRAWN, MEDIAN, SIGMA = 64, 80, 284, 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One distribution of lengths and budget; times are sums over all documents."""

    lengths: str
    share: float
    """Where the budget lies between recomputing (0) and keeping (1) everything at the longest."""
    documents: int
    time_vs_optimum: float
    time_vs_full: float
    time_vs_best_static_list: float
    time_vs_best_static_sets: float
    optimum_vs_best_static_list: float
    """The least that any planner can reach on these costs."""
    optimum_vs_best_static_sets: float
    proved: int
    """Documents whose optimum the integer program proved; for the others its bound counts."""


class Steps:
    """Steps of one model at any length.

    Args:
        profile: What they cost.
        pace: How fast the device is.
    """

    def __init__(self, profile: StepProfile, pace: Pace) -> None:
        self.profile, self.pace = profile, pace
        self.num_units = len(profile.unit_names)

    def problem(self, length: int, given: Sequence[Action] | None = None) -> Problem:
        """Returns the problem at a length, or that in which every unit has one option."""
        costs = self.profile.costs_at(batch=1, length=length)
        chosen = None if given is None else tuple(given)
        return problem_of(costs, self.pace, allowed=ALLOWED, given=chosen)

    def rise(self, length: int, action: Action) -> int:
        """Returns how far a step rises with every unit under one action."""
        return rise_of(self.problem(length, [action] * self.num_units))

    def seconds(self, length: int, actions: Sequence[Action] | None = None) -> float:
        """Returns the time of a step; without actions with everything kept."""
        costs = self.profile.costs_at(batch=1, length=length)
        kept = forward_seconds(costs, self.pace) * (1 + BACKWARD_FORWARDS)
        if actions is None:
            return kept
        only = self.problem(length, actions)
        return kept + seconds_of(only, [0] * self.num_units)

    def planned_seconds(self, length: int, room_bytes: int) -> float:
        """Returns the time of the plan of the length's bucket at the length itself."""
        bucket = min(length_of_bucket(length), LONGEST)
        costs = self.profile.costs_at(batch=1, length=bucket)
        proposal = propose(costs, self.problem(bucket), self.pace, room_bytes=room_bytes)
        assert proposal.fits, "every budget of this benchmark is enough"
        return self.seconds(length, proposal.plan.actions)

    def best_seconds(self, length: int, room_bytes: int) -> tuple[float, bool]:
        """Returns the least time of any plan, or a bound of it, and whether it is proved."""
        problem = self.problem(length)
        budget = problem.fixed.total + room_bytes
        if self.rise(length, Keep()) <= room_bytes:
            return self.seconds(length), True
        answer = solve_exactly(problem, budget_bytes=budget, time_limit_seconds=5.0)
        proved = answer.is_proved and answer.assignment is not None
        extra = seconds_of(problem, answer.assignment) if proved else answer.bound_seconds
        return self.seconds(length) + extra, proved


def measure(steps: Steps, name: str, lengths: Sequence[int], share: float) -> Row:
    """Plans for every length, and adds up."""
    low, high = steps.rise(LONGEST, Recompute()), steps.rise(LONGEST, Keep())
    room = low + int(share * (high - low))
    counts = Counter(lengths)
    ours = best = full = kept = 0.0
    proved = 0
    for length, count in counts.items():
        optimum, is_proved = steps.best_seconds(length, room)
        ours += count * steps.planned_seconds(length, room)
        best += count * optimum
        full += count * steps.seconds(length, [Recompute()] * steps.num_units)
        kept += count * steps.seconds(length)
        proved += count * is_proved
    costs = steps.profile.costs_at(batch=1, length=LONGEST)
    lists = tuple(listed_option(unit, steps.pace) for unit in costs.classes)
    plain = replace(
        steps.problem(LONGEST),
        units=tuple(
            (*(o for o in options if isinstance(o.action, (Keep, Recompute))), lists[slot])
            for options, slot in zip(steps.problem(LONGEST).units, costs.unit_classes, strict=True)
        ),
    )
    static = [_static(steps, problem, counts, room) for problem in (plain, steps.problem(LONGEST))]
    return Row(
        lengths=name,
        share=share,
        documents=len(lengths),
        time_vs_optimum=ours / best,
        time_vs_full=ours / full,
        time_vs_best_static_list=ours / (kept + static[0]),
        time_vs_best_static_sets=ours / (kept + static[1]),
        optimum_vs_best_static_list=best / (kept + static[0]),
        optimum_vs_best_static_sets=best / (kept + static[1]),
        proved=proved,
    )


def _static(steps: Steps, problem: Problem, counts: Counter[int], room_bytes: int) -> float:
    """Returns the time beyond keeping of the best mix that fits the longest, over all documents."""
    known: dict[tuple[int, Action], float] = {}

    def over_all(unit: int, option: Option) -> Option:
        slot = steps.profile.unit_classes[unit]
        if (slot, option.action) not in known:
            known[slot, option.action] = sum(
                count
                * steps.problem(length, [option.action] * steps.num_units).units[unit][0].seconds
                for length, count in counts.items()
            )
        return replace(option, seconds=known[slot, option.action])

    units = tuple(
        tuple(over_all(i, option) for option in options) for i, options in enumerate(problem.units)
    )
    summed = replace(problem, units=units)
    budget = problem.fixed.total + room_bytes
    answer = solve_exactly(summed, budget_bytes=budget, time_limit_seconds=20.0)
    assert answer.assignment is not None, "recomputing everything fits"
    return seconds_of(summed, answer.assignment)


def lengths_of(name: str) -> list[int]:
    """Returns the lengths of the embedded texts at a quarter, or of a log-normal tail."""
    if name == "corpus":
        texts = [document.text for document in load_corpus(DataConfig()).documents]
        cut = [min(LONGEST, len(text) // 4) for text in texts]
        return [length for length in cut if length >= SHORTEST]
    shares = [(i + 0.5) / NUM_DRAWN for i in range(NUM_DRAWN)]
    drawn = [MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(share)) for share in shares]
    return [max(8, min(LONGEST, round(length))) for length in drawn]


def make_steps(pace: Pace, *, num_layers: int = 8) -> Steps:
    """Traces the model of tiny-cpu."""
    recipe = load_recipe("tiny-cpu", [f"model.config.num_hidden_layers={num_layers}"])
    profile = trace_recipe(recipe, on_accelerator=False, actions=(), max_length=LONGEST)
    return Steps(profile, pace)


def main() -> int:
    """Prints the figures; 1 if plans take more than 1.01 times the optimum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures alone, for scripts")
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth document")
    parser.add_argument(
        "--reference", action="store_true", help="reckon with the CPU of the catalogue, not this"
    )
    arguments = parser.parse_args()
    steps = make_steps(pace_of(REFERENCE_CPU if arguments.reference else local_cpu()))
    rows = [
        measure(steps, name, sorted(lengths_of(name))[:: -arguments.every], share)
        for name in ("corpus", "log-normal")
        for share in (0.5, 0.25)
    ]
    plain = [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]
    if arguments.json:
        worst = max(row.time_vs_optimum for row in rows)
        print(json.dumps({"time_vs_optimum_max": worst, "rows": plain}))
    else:
        for row in plain:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    return int(max(row.time_vs_optimum for row in rows) > 1.01)


if __name__ == "__main__":
    sys.exit(main())

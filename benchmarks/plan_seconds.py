"""How well `rematic plan` tells the time of a step on this CPU: predicted against measured.

    .venv/bin/python benchmarks/plan_seconds.py --json

A few blocks of tiny-cpu with every option that the planner has (keep, op sets, recompute) and the
plain list of ops, each for all blocks at once, in turns in one process on one thread. What counts
is the ratio to the step that keeps everything, and which of two options is the faster one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator

import torch

from rematic.activations import Engine
from rematic.cost import StepProfile, trace_recipe
from rematic.cost.calibrate import local_cpu
from rematic.cost.roofline import pace_of
from rematic.memory import use_caching_malloc
from rematic.planner import Option, Pace, problem_of
from rematic.planner.forecast import BACKWARD_FORWARDS, forward_seconds
from rematic.planner.frontier import listed_option
from rematic.policy import Plan
from rematic.recipes import load_recipe
from rematic.training.model import build_model

CLOSE = 0.03
"""Options whose measured times differ by less than this share are not ordered."""

MEASURED_ACTIONS = ("keep", "selective", "recompute")


def main() -> None:
    """Prints the errors of the ratios and the share of pairs that are ordered right."""
    arguments = _arguments()
    torch.set_num_threads(1)
    use_caching_malloc()
    recipe = load_recipe("tiny-cpu", [f"model.config.num_hidden_layers={arguments.layers}"])
    profile, pace = trace_recipe(recipe, on_accelerator=False), pace_of(local_cpu())
    model = build_model(recipe.model, max_length=max(arguments.lengths), seed=0)
    rows = [
        row
        for length in arguments.lengths
        for row in _measure(model, profile, pace, length=length, repeats=arguments.repeats)
    ]
    errors = [abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in rows]
    right, pairs = _ordered(rows)
    result = {
        "ratio_error_median": statistics.median(errors),
        "ratio_error_max": max(errors),
        "pairs": pairs,
        "pairs_ordered_right": right,
        "device": local_cpu().source,
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print({key: value for key, value in result.items() if key != "rows"})


def _measure(
    model: torch.nn.Module, profile: StepProfile, pace: Pace, *, length: int, repeats: int
) -> Iterator[dict[str, float]]:
    costs = profile.costs_at(batch=1, length=length)
    options = [o for o in problem_of(costs, pace).units[1] if o.action.name in MEASURED_ACTIONS]
    options = [o for o in options if o.action.name == "keep"] + [
        *(o for o in options if o.action.name != "keep"),
        listed_option(costs.classes[1], pace),
    ]
    kept_seconds = forward_seconds(costs, pace) * (1 + BACKWARD_FORWARDS)
    num_units = len(costs.unit_classes)
    measured = _step_seconds(model, options, length=length, repeats=repeats)
    for option, seconds in zip(options, measured, strict=True):
        yield {
            "length": length,
            "kept_bytes": option.kept_bytes,
            "measured_seconds": seconds,
            "predicted_seconds": kept_seconds + num_units * option.seconds,
            "measured_ratio": seconds / measured[0],
            "predicted_ratio": 1 + num_units * option.seconds / kept_seconds,
        }


def _step_seconds(
    model: torch.nn.Module, options: list[Option], *, length: int, repeats: int
) -> list[float]:
    """Returns the fastest forward and backward with each option for every unit, taken in turns."""
    ids = torch.randint(0, 256, (1, length))
    engine = Engine(model)
    fastest = [float("inf")] * len(options)
    for repeat in range(repeats + 1):
        for i, option in enumerate(options):
            model.zero_grad(set_to_none=True)
            gc.collect()
            engine.apply(Plan(actions=(option.action,) * len(engine.units)))
            started = time.thread_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            if repeat:  # the first one warms up
                fastest[i] = min(fastest[i], time.thread_time() - started)
    engine.detach()
    return fastest


def _ordered(rows: list[dict[str, float]]) -> tuple[int, int]:
    """Returns how many pairs of one length are ordered right, and how many differ enough."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        measured = a["measured_seconds"] - b["measured_seconds"]
        if a["length"] != b["length"] or abs(measured) < CLOSE * a["measured_seconds"]:
            continue
        pairs += 1
        right += measured * (a["predicted_seconds"] - b["predicted_seconds"]) > 0
    return right, pairs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures alone, for scripts")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model, at least 2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    main()

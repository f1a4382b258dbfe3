"""Lets memory run out everywhere in training steps and compares with steps without failure.

A trial ends as `recovered` (everything has the same bits), `stopped_cleanly` (an error, and
everything as before what failed) or `wrong`. Four sweeps:

    .venv/bin/python benchmarks/fault_sweep.py units --json
        One micro-batch of five families under each action, failing at every op of forward, loss
        and backward, with the retry of units alone and with that of ops.
    .venv/bin/python benchmarks/fault_sweep.py steps --json
        Every micro-batch and optimizer step of two steps of a model with dropout, running
        statistics and a tied weight, accumulation 1 and 3, fp32 and bf16, failing at every op and
        after every allocation, with each answer alone and all together.
    .venv/bin/python benchmarks/fault_sweep.py random --json
        Whole trainings of any kind with one to four failures, drawn from 1,000 seeds.
    .venv/bin/python benchmarks/fault_sweep.py budgets --json
        Whole trainings within budgets from what `recompute` needs to what `keep` needs.

`--jobs 2` runs two processes. With `--out FILE` every setting is kept when it has ended, and
`--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are those of the tests

from benchmarks.fault_models import FAMILIES, MODELS, TIED, TOKEN_WISE
from benchmarks.fault_tallies import SavedTallies, Tally, summary, total
from benchmarks.fault_trials import KINDS, LEVELS, Setting, Trials
from rematic.memory import MemorySnapshot, SimulatedProbe
from rematic.policy import ACTIONS, Tile

SWEEPS = ("units", "steps", "random", "budgets")
LOSSLESS_AND_COMPRESS = [name for name in ACTIONS if name != "tile"]
"""`tile` is for token-wise units, which some models have not."""
_LATER = 1
"""A micro-batch onto the gradients of another one, in a session that knows the model."""
A = TypeVar("A")


def sweep(
    setting: Setting,
    *,
    stages: Sequence[int] | None = None,
    limit: int = sys.maxsize,
    offset: int = 0,
) -> Tally:
    """Lets memory run out once at every position of stages.

    Args:
        setting: What runs.
        stages: Numbers of the stages; None for all, micro-batches and optimizer steps.
        limit: The most positions in a stage, evenly apart.
        offset: Where they begin.
    """
    tally = Tally(setting=setting)
    with Trials(setting) as trials:
        for number in range(len(trials.stages)) if stages is None else stages:
            ops = trials.survey(number)
            positions = trials.positions(ops)
            stride = max(1, -(-len(positions) // limit))
            for position in positions[offset % stride :: stride]:
                outcome = trials.judge(number, position)
                op = ops[position - 1]
                where = f"stage {number}, op {position} {op.name}"
                tally.add(outcome, where, in_unit=op.in_unit)
    return tally


def random_trial(seed: int, *, models: Sequence[str], actions: Sequence[str]) -> Tally:
    """Draws a setting with the answer of the step at least, and one to four failures."""
    draw = random.Random(seed)
    setting = Setting(
        model=draw.choice(models),
        action=draw.choice(actions),
        level=draw.choice(("step", "all")),
        accumulate=draw.choice((1, 3)),
        autocast=draw.random() < 0.25,
        kind=draw.choice(KINDS),
    )
    tally = Tally(setting=setting)
    with Trials(setting) as trials:
        possible = trials.positions(trials.survey_all())
        positions = sorted(draw.sample(possible, draw.randint(1, 4)))
        tally.add(trials.judge_all(positions), f"seed {seed}, ops {positions}")
    return tally


class SilentProbe(SimulatedProbe):
    """Does not say what the device has, so that plans do not obey it and memory runs out."""

    def snapshot(self) -> MemorySnapshot:
        """Returns what is known of memory, without its size."""
        return replace(super().snapshot(), capacity_bytes=None)


def sweep_budgets(setting: Setting, *, number: int) -> Tally:
    """Trains within budgets from what `recompute` needs to just below what the setting needs."""
    tally = Tally(setting=setting)
    lowest = _peak(Setting(**{**vars(setting), "action": "recompute"}))
    highest = _peak(setting)
    for i in range(number if highest > lowest else 0):
        budget = lowest + (highest - lowest) * i // number
        with Trials(setting, SilentProbe(budget)) as trials:
            tally.add(trials.judge_budget(), f"{budget} bytes")
    return tally


def _peak(setting: Setting) -> int:
    probe = SimulatedProbe()
    with Trials(setting, probe) as trials:
        trials.judge_budget()
    return probe.peak_allocated_bytes


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    axes = (options.models, options.actions, options.levels, options.accumulate, options.kinds)
    for model, action, level, accumulate, kind in itertools.product(*axes):
        if action == Tile.name and model not in TOKEN_WISE:
            continue
        for autocast in options.autocast:
            yield Setting(
                model=model,
                action=action,
                level=level,
                accumulate=accumulate,
                autocast=autocast == "bf16",
                kind=kind,
            )


_DEFAULTS: dict[str, dict[str, list[object]]] = {
    "units": {
        "models": [*FAMILIES],
        "actions": [*ACTIONS],
        "levels": ["unit", "op+unit"],
        "accumulate": [2],
        "kinds": [KINDS[0]],
        "autocast": ["fp32"],
    },
    "steps": {
        "models": [TIED],
        "actions": ["keep", "recompute"],
        "levels": [level for level in LEVELS if level != "op+unit"],
        "accumulate": [1, 3],
        "kinds": [*KINDS],
        "autocast": ["fp32", "bf16"],
    },
    "random": {"models": [*MODELS], "actions": [*LOSSLESS_AND_COMPRESS]},
    "budgets": {
        "models": [TIED, "transformer-encoder", "llama", "gpt2"],
        "actions": ["keep", "selective"],
        "levels": ["all"],
        "accumulate": [1, 3],
        "kinds": [KINDS[0]],
        "autocast": ["fp32"],
    },
}


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write every setting when it has ended")
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="positions of a stage")
    parser.add_argument("--seeds", type=int, default=1000, help="of `random`")
    parser.add_argument("--budgets", type=int, default=12, help="of a setting")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--actions", nargs="+", choices=ACTIONS)
    parser.add_argument("--levels", nargs="+", choices=LEVELS)
    parser.add_argument("--accumulate", nargs="+", type=int)
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--autocast", nargs="+", choices=("fp32", "bf16"))
    options = parser.parse_args(arguments)
    for key, value in _DEFAULTS[options.sweep].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    return options


def _run(run: Callable[[A], Tally], inputs: Sequence[A], *, jobs: int) -> Iterator[Tally]:
    if jobs == 1:
        _prepare()
        yield from map(run, inputs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        yield from pool.map(run, inputs)


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.getLogger("rematic").setLevel(logging.ERROR)  # what cannot move is said each time


def main(arguments: list[str]) -> int:
    """Prints the counts; 1 if any trial did not end as it must."""
    options = _arguments(arguments)
    run: Callable[[Any], Tally]
    inputs: Sequence[Any] = range(options.seeds)
    if options.sweep == "random":
        run = functools.partial(random_trial, models=options.models, actions=options.actions)
    else:
        inputs = list(_settings(options))
        run = functools.partial(sweep, limit=options.limit)
        if options.sweep == "units":
            run = functools.partial(sweep, limit=options.limit, stages=(_LATER,))
        elif options.sweep == "budgets":
            run = functools.partial(sweep_budgets, number=options.budgets)
    saved = SavedTallies(options.out, _what_matters(options), resume=options.resume)
    open_numbers = [number for number in range(len(inputs)) if number not in saved.found]
    found = _run(run, [inputs[number] for number in open_numbers], jobs=options.jobs)
    for number, tally in zip(open_numbers, found, strict=True):
        saved.add(number, tally)
        if not options.json:
            row = {**vars(tally.setting), **total([tally])}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    result = summary(saved.found.values())
    print(json.dumps(result if options.json else total(saved.found.values())))
    return int(bool(result["not_as_it_must_be"]))


def _what_matters(options: argparse.Namespace) -> dict[str, object]:
    """Returns the options that say what a number of the sweep is."""
    left_out = ("json", "jobs", "out", "resume", "seeds")
    return {key: value for key, value in vars(options).items() if key not in left_out}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

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

`--jobs 2` runs two processes.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are those of the tests

from benchmarks.fault_models import FAMILIES, MODELS, TIED, TOKEN_WISE
from benchmarks.fault_trials import KINDS, LEVELS, Setting, Trials
from rematic.memory import SimulatedProbe
from rematic.policy import ACTIONS, Tile

SWEEPS = ("units", "steps", "random", "budgets")
LOSSLESS_AND_COMPRESS = [name for name in ACTIONS if name != "tile"]
"""`tile` is for token-wise units, which some models have not."""
COMPLETE = ("op+unit", "all")
"""Levels that leave no failure without an answer."""
KEYS = ("positions", "recovered", "stopped_cleanly", "wrong")
_LATER = 1
"""A micro-batch onto the gradients of another one, in a session that knows the model."""
Row = dict[str, int]
A = TypeVar("A")


@dataclass(kw_only=True)
class Tally:
    """What became of the trials of one setting."""

    setting: Setting
    counts: Counter[str] = field(default_factory=Counter)
    """By outcome, and `inside_units` with `inside_units_recovered`."""
    examples: list[str] = field(default_factory=list)
    """What is not as it must be, in words."""

    def add(self, outcome: str, where: str, *, in_unit: bool = False) -> None:
        """Counts one trial."""
        kind = outcome.split(":")[0]
        self.counts.update({"positions": 1, kind: 1})
        if in_unit:
            self.counts.update({"inside_units": 1, "inside_units_recovered": kind == "recovered"})
        must_recover = self.setting.level in COMPLETE or (in_unit and "unit" in self.setting.level)
        if kind == "wrong" or (must_recover and kind != "recovered"):
            self.examples.append(f"{self.setting}, {where}: {outcome}")


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


def sweep_budgets(setting: Setting, *, number: int) -> Tally:
    """Trains within budgets from what `recompute` needs to just below what the setting needs."""
    tally = Tally(setting=setting)
    lowest = _peak(Setting(**{**vars(setting), "action": "recompute"}))
    highest = _peak(setting)
    for i in range(number if highest > lowest else 0):
        budget = lowest + (highest - lowest) * i // number
        with Trials(setting, SimulatedProbe(budget)) as trials:
            tally.add(trials.judge_budget(), f"{budget} bytes")
    return tally


def _peak(setting: Setting) -> int:
    probe = SimulatedProbe()
    with Trials(setting, probe) as trials:
        trials.judge_budget()
    return probe.peak_allocated_bytes


def summary(tallies: Iterable[Tally]) -> dict[str, object]:
    """Adds up, in all and by what the settings differ in."""
    tallies = list(tallies)
    examples = [example for tally in tallies for example in tally.examples]
    groups: dict[str, object] = {}
    for key in ("model", "action", "level", "accumulate", "autocast", "kind"):
        names = dict.fromkeys(str(getattr(tally.setting, key)) for tally in tallies)
        if len(names) > 1:
            groups[f"by_{key}"] = {
                name: _total(t for t in tallies if str(getattr(t.setting, key)) == name)
                for name in names
            }
    complete = [tally for tally in tallies if tally.setting.level in COMPLETE]
    return {
        **_total(tallies),
        "with_every_answer": _total(complete),
        **groups,
        "not_as_it_must_be": len(examples),
        "examples": examples[:20],
    }


def _total(tallies: Iterable[Tally]) -> Row:
    counts: Counter[str] = Counter()
    for tally in tallies:
        counts.update(tally.counts)
    inside = ("inside_units", "inside_units_recovered") if counts["inside_units"] else ()
    return {key: counts[key] for key in (*KEYS, *inside)}


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
    if options.sweep == "random":
        draw = functools.partial(random_trial, models=options.models, actions=options.actions)
        found = _run(draw, range(options.seeds), jobs=options.jobs)
    else:
        run: Callable[[Setting], Tally] = functools.partial(sweep, limit=options.limit)
        if options.sweep == "units":
            run = functools.partial(sweep, limit=options.limit, stages=(_LATER,))
        elif options.sweep == "budgets":
            run = functools.partial(sweep_budgets, number=options.budgets)
        found = _run(run, list(_settings(options)), jobs=options.jobs)
    tallies = []
    for tally in found:
        tallies.append(tally)
        if not options.json:
            row = {**vars(tally.setting), **_total([tally])}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    result = summary(tallies)
    print(json.dumps(result if options.json else _total(tallies)))
    return int(bool(result["not_as_it_must_be"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

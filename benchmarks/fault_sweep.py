"""Fails an allocation at every op of whole training steps and compares with steps without failure.

For every n, the n-th op of forward, loss, backward or optimizer fails once, for six models, six
actions, one and three micro-batches per optimizer step, and each answer (op, unit, step) alone and
all together. A trial ends as `recovered` (everything has the same bits), `stopped_cleanly` (an
error, and everything as before what failed) or `wrong`.

    .venv/bin/python benchmarks/fault_sweep.py --json --limit 12
    .venv/bin/python benchmarks/fault_sweep.py --json --models tied --actions keep --stride 1
    .venv/bin/python benchmarks/fault_sweep.py --json --random 1000

Every position of every combination takes hours on one core: run it in parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are those of the tests

from benchmarks.fault_trials import KINDS, LEVELS, MODELS, Setting, judge, plain_marks, reference
from rematic.policy import ACTIONS

LOSSLESS_AND_COMPRESS = [name for name in ACTIONS if name != "tile"]
"""`tile` is for token-wise units, which these models have not."""
OUTCOMES = ("recovered", "stopped_cleanly", "wrong")
Row = dict[str, object]


def check_plain(setting: Setting) -> str | None:
    """Names what a run without failures has otherwise than plain steps, None for nothing."""
    plain = plain_marks(setting.model, setting.accumulate, setting.autocast)
    for found, wanted in zip(reference(setting)[0], plain, strict=True):
        wrong = found.differs_from(wanted, lossy=setting.is_lossy)
        if wrong:
            return f"wrong without a failure after {found.name}: {wrong[:3]}"
    return None


def sweep(
    setting: Setting, *, stride: int, offset: int = 0, limit: int = sys.maxsize
) -> tuple[Counter[str], list[str]]:
    """Lets memory run out once at every `stride`-th position; returns counts and what is wrong.

    Args:
        setting: What runs.
        stride: Distance of the positions.
        offset: Where they begin, modulo the stride.
        limit: The most positions; the stride is raised to keep to it.
    """
    different = check_plain(setting)
    wrong = [] if different is None else [different]
    _, number = reference(setting)
    counts: Counter[str] = Counter(wrong=len(wrong))
    stride = max(stride, -(-number // limit))
    for position in range(1 + offset % stride, number + 1, stride):
        outcome = judge(setting, (position,))
        if not outcome.startswith("wrong"):
            counts[outcome] += 1
            continue
        counts["wrong"] += 1
        wrong.append(f"position {position}: {outcome}")
    return counts, wrong


def random_trials(number: int, models: list[str], actions: list[str]) -> tuple[Row, list[str]]:
    """Draws setting and one to four failures for each seed, with every answer in force."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(number):
        draw = random.Random(seed)
        setting = Setting(
            model=draw.choice(models),
            action=draw.choice(actions),
            level=draw.choice(("step", "all")),
            accumulate=draw.choice((1, 3)),
            autocast=draw.random() < 0.25,
            kind=draw.choice(KINDS),
        )
        _, last = reference(setting)
        positions = tuple(sorted(draw.sample(range(1, last + 1), draw.randint(1, 4))))
        outcome = judge(setting, positions)
        counts["wrong" if outcome.startswith("wrong") else outcome] += 1
        if outcome.startswith("wrong"):
            wrong.append(f"seed {seed}, {setting}, {positions}: {outcome}")
    return {"random": number, **_totals(counts), "not_reached": counts["not_reached"]}, wrong


def _totals(counts: Counter[str]) -> Row:
    return {
        "positions": sum(counts[outcome] for outcome in OUTCOMES),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
    }


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    axes = (options.models, options.actions, options.levels, options.accumulate)
    for model, action, level, accumulate in itertools.product(*axes):
        for kind in options.kinds:
            yield Setting(
                model=model,
                action=action,
                level=level,
                accumulate=accumulate,
                autocast=options.autocast,
                kind=kind,
            )


def _by(rows: Iterable[Row], key: str) -> dict[str, Row]:
    grouped: dict[str, Counter[str]] = {}
    for row in rows:
        counts = grouped.setdefault(str(row[key]), Counter())
        counts.update({outcome: int(str(row[outcome])) for outcome in OUTCOMES})
    return {name: _totals(counts) for name, counts in grouped.items()}


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--stride", type=int, default=1, help="only every n-th position")
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="positions of a setting")
    parser.add_argument("--random", type=int, metavar="N", help="N seeds with several failures")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--actions", nargs="+", choices=LOSSLESS_AND_COMPRESS, default=LOSSLESS_AND_COMPRESS
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:1]))
    parser.add_argument("--autocast", action="store_true", help="bfloat16 in forward")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Prints the counts in all and by model, action and level; 1 if any trial was wrong."""
    options = _arguments(arguments)
    torch.set_num_threads(1)
    logging.getLogger("rematic").setLevel(logging.ERROR)  # what cannot move is said each time
    if options.random:
        totals, wrong = random_trials(options.random, options.models, options.actions)
        print(json.dumps({**totals, "examples": wrong[:20]}))
        return int(bool(wrong))
    rows: list[Row] = []
    wrong = []
    for i, setting in enumerate(_settings(options)):
        counts, examples = sweep(setting, stride=options.stride, offset=i * 7, limit=options.limit)
        rows.append({**vars(setting), **_totals(counts)})
        wrong += [f"{setting}: {example}" for example in examples]
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        reference.cache_clear()
    totals = {key: sum(int(str(row[key])) for row in rows) for key in ("positions", *OUTCOMES)}
    groups = {f"by_{key}": _by(rows, key) for key in ("model", "action", "level", "accumulate")}
    result = {**totals, **groups, "examples": wrong[:20]}
    print(json.dumps(result if options.json else totals))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

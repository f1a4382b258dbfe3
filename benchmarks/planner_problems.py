"""Stacks of blocks with the proportions of language models, to measure the planner on."""

from __future__ import annotations

import random
from dataclasses import replace

from rematic.planner import FixedBytes, Option, Problem, Surroundings, peak_of, solve
from rematic.policy import Action, Keep, Recompute, RecomputeOffload, Selective

HIDDEN_BYTES = 8192 * 2 * 4096
"""Bytes of one hidden state: 8,192 tokens of width 4,096 in bfloat16."""


def stack(num_units: int, *, seed: int = 0, num_actions: int = 7, classes: int = 3) -> Problem:
    """Returns a stack whose first and last blocks are of classes of their own.

    Each class has `keep`, op sets of falling worth, `recompute` and `recompute+offload`.

    Args:
        num_units: Number of blocks.
        seed: Chooses bytes and seconds.
        num_actions: Options of each block, at least 3.
        classes: Number of classes, 1 to 3.
    """
    rng = random.Random(seed)
    options = [_block(rng, num_actions) for _ in range(classes)]
    middle = [options[1 % classes]] * max(0, num_units - 2)
    return Problem(
        fixed=FixedBytes(weights=20 * 10**9),
        around=Surroundings(
            embedding_forward=HIDDEN_BYTES,
            embedding_kept=HIDDEN_BYTES,
            head=int(HIDDEN_BYTES * rng.uniform(1, 30)),
            head_left=2 * HIDDEN_BYTES,
            embedding_backward=2 * HIDDEN_BYTES,
            embedding_gradient=-HIDDEN_BYTES,
            optimizer=5 * HIDDEN_BYTES,
        ),
        units=tuple([options[0], *middle, options[-1]][:num_units]),
    )


def budgets(problem: Problem, number: int) -> list[int]:
    """Returns budgets from the smallest that is enough to that of keeping everything.

    Args:
        problem: A problem whose first options keep most.
        number: How many, at least 2.
    """
    low = solve(problem, budget_bytes=0).peak.total
    high = peak_of(problem, [0] * len(problem.units)).total
    return [low + (high - low) * j // (number - 1) for j in range(number)]


def kept_seconds(problem: Problem) -> float:
    """Returns a time for the whole step with everything kept.

    Forward as long as what a plain replay costs, backward twice that; the host's share aside.
    """
    return sum(
        3 * next(o.seconds for o in options if isinstance(o.action, Recompute))
        for options in problem.units
    )


def keep_or_recompute(problem: Problem) -> Problem:
    """Returns the problem with these two actions alone: what many planners can express."""
    units = {
        options: tuple(o for o in options if isinstance(o.action, (Keep, Recompute)))
        for options in set(problem.units)
    }
    return replace(problem, units=tuple(units[options] for options in problem.units))


def _block(rng: random.Random, num_actions: int) -> tuple[Option, ...]:
    keep = int(HIDDEN_BYTES * rng.uniform(14, 40))
    seconds = rng.uniform(0.03, 0.09)
    forward, backward = int(keep * rng.uniform(1.0, 1.3)), int(keep * rng.uniform(0.1, 0.4))
    shares = sorted((rng.uniform(0.05, 0.9) for _ in range(num_actions - 3)), reverse=True)

    def option(action: Action, kept: int, rise: int, time: float, *, moved: int = 0) -> Option:
        return Option(
            action=action,
            kept_bytes=kept,
            forward_bytes=rise,
            backward_bytes=keep + backward - kept,
            gradient_bytes=HIDDEN_BYTES // 3,
            seconds=time,
            moved_bytes=moved,
        )

    options = [option(Keep(), keep, forward, 0.0)]
    for share in shares:
        kept = int(HIDDEN_BYTES + share * (keep - HIDDEN_BYTES))
        time = seconds * (1 - share ** rng.uniform(0.3, 0.8)) + 0.003
        options.append(option(Selective(), kept, int(forward * rng.uniform(0.6, 1)), time))
    replay = seconds + 0.0012
    options.append(option(Recompute(), HIDDEN_BYTES, forward // 2, replay))
    moving = replay + 2 * HIDDEN_BYTES / 20e9
    options.append(option(RecomputeOffload(), 0, forward // 2, moving, moved=HIDDEN_BYTES))
    return tuple(options)

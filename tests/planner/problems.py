"""Problems to solve: small ones drawn by hypothesis, and stacks shaped like language models."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from rematic.planner import FixedBytes, Option, Problem, Surroundings, peak_of, solve
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload, Selective

ACTIONS: tuple[Action, ...] = (Keep(), Selective(), Recompute(), RecomputeOffload(), Offload())


def option(kept=0, forward=0, backward=0, gradient=0, seconds=0.0, moved=0, action=None):
    return Option(
        action=action or Keep(),
        kept_bytes=kept,
        forward_bytes=forward,
        backward_bytes=backward,
        gradient_bytes=gradient,
        seconds=seconds,
        moved_bytes=moved,
    )


@st.composite
def small_problems(draw, max_units=5, max_options=3, same_gradients=True):
    """Problems without structure, zero bytes and zero seconds among them."""
    num_bytes = st.integers(0, 1000)
    units = []
    for _ in range(draw(st.integers(1, max_units))):
        gradient = draw(st.integers(-50, 200))
        units.append(
            tuple(
                option(
                    kept=draw(num_bytes),
                    forward=draw(num_bytes),
                    backward=draw(num_bytes),
                    gradient=gradient if same_gradients else draw(st.integers(0, 200)),
                    seconds=draw(st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 7.0])),
                    action=ACTIONS[a],
                )
                for a in range(draw(st.integers(1, max_options)))
            )
        )
    around = {
        name: draw(num_bytes)
        for name in ("embedding_forward", "embedding_kept", "head", "head_left", "optimizer")
    }
    return Problem(
        fixed=FixedBytes(weights=draw(num_bytes)),
        around=Surroundings(**around, embedding_gradient=-around["embedding_kept"]),
        units=tuple(units),
    )


def stack(num_units, *, seed=0, num_actions=7, classes=3):
    """A stack of blocks: first and last of a class of their own, op sets of falling worth."""
    rng = random.Random(seed)
    hidden = 8192 * 2 * 4096
    options = [_block(rng, hidden, num_actions) for _ in range(classes)]
    middle = [options[1 % classes]] * max(0, num_units - 2)
    return Problem(
        fixed=FixedBytes(weights=20 * 10**9),
        around=Surroundings(
            embedding_forward=hidden,
            embedding_kept=hidden,
            head=int(hidden * rng.uniform(1, 30)),
            head_left=2 * hidden,
            embedding_backward=2 * hidden,
            embedding_gradient=-hidden,
            optimizer=5 * hidden,
        ),
        units=tuple([options[0], *middle, options[-1]][:num_units]),
    )


def budgets(problem, number):
    """Budgets from the smallest that is enough to that of keeping everything."""
    low = solve(problem, budget_bytes=0).peak.total
    high = peak_of(problem, [0] * len(problem.units)).total
    return [low + (high - low) * j // (number - 1) for j in range(number)]


def _block(rng, hidden, num_actions):
    keep = int(hidden * rng.uniform(14, 40))
    seconds = rng.uniform(0.03, 0.09)
    forward, backward = int(keep * rng.uniform(1.0, 1.3)), int(keep * rng.uniform(0.1, 0.4))
    gradient = hidden // 3
    shares = sorted((rng.uniform(0.05, 0.9) for _ in range(num_actions - 3)), reverse=True)
    options = [option(keep, forward, backward, gradient)]
    for share in shares:
        kept = int(hidden + share * (keep - hidden))
        options.append(
            option(
                kept,
                int(forward * rng.uniform(0.6, 1)),
                keep + backward - kept,
                gradient,
                seconds * (1 - share ** rng.uniform(0.3, 0.8)) + 0.003,
                action=Selective(),
            )
        )
    replay = seconds + 0.0012
    options.append(
        option(hidden, forward // 2, keep + backward - hidden, gradient, replay, 0, Recompute())
    )
    moving = replay + 2 * hidden / 20e9
    options.append(
        option(0, forward // 2, keep + backward, gradient, moving, hidden, RecomputeOffload())
    )
    return tuple(options)

"""The learning rate over a run."""

from __future__ import annotations

import math


def rate_factor(
    step: int,
    *,
    schedule: str,
    warmup_steps: int,
    total_steps: int | None,
    final_share: float,
) -> float:
    """Returns the share of the learning rate that an optimizer step has.

    Args:
        step: Number of the step, the first is 0.
        schedule: `constant`, `linear` or `cosine` (arXiv:1608.03983, without restarts).
        warmup_steps: Steps over which the share rises linearly to 1.
        total_steps: Steps in all; the last one has `final_share`. None: the rate does not fall.
        final_share: Share of the last step.

    >>> [round(rate_factor(step, schedule="linear", warmup_steps=1, total_steps=4,
    ...                    final_share=0.1), 2) for step in range(4)]
    [0.5, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or total_steps is None:
        return 1.0
    falling_steps = max(1, total_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / falling_steps)
    share = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return final_share + (1 - final_share) * share

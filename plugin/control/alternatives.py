"""What a step would have taken under other policies, as far as was known before it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rematic.control.replay import ReplayedStep
from rematic.control.samples import usual_rate
from rematic.control.step_plan import plan_step
from rematic.policy import Policy


class Alternative(NamedTuple):
    """A step under one policy."""

    policy: str
    """Its name."""
    predicted_peak_bytes: int | None
    """Highest bytes in use expected; None where nothing like it was measured."""
    seconds: float | None
    """Time of forward and backward, by the steps of that policy at such lengths; None where there
    were none."""
    is_chosen: bool
    """Whether it was in force."""


def alternatives(step: ReplayedStep, policies: Sequence[Policy]) -> tuple[Alternative, ...]:
    """Returns the step under each policy, the one in force among them.

    Args:
        step: The step.
        policies: What to compare; the rules of the policy in force are not applied to them.
    """
    in_force: str = step.event["policy"]
    found = [_alternative(step, policy) for policy in policies if policy.name != in_force]
    chosen = Alternative(
        policy=in_force,
        predicted_peak_bytes=step.event["predicted_peak_bytes"],
        seconds=_seconds(step, in_force),
        is_chosen=True,
    )
    return (chosen, *found)


def _alternative(step: ReplayedStep, policy: Policy) -> Alternative:
    actions = (policy.default,) * len(step.request.actions)
    request = dataclasses.replace(step.request, actions=actions)
    return Alternative(
        policy=policy.name,
        predicted_peak_bytes=plan_step(step.costs, request).predicted_peak_bytes,
        seconds=_seconds(step, policy.name),
        is_chosen=False,
    )


def _seconds(step: ReplayedStep, policy: str) -> float | None:
    tokens, length = step.request.tokens, step.request.length
    rate = usual_rate(step.before.samples, policy, length)
    return None if rate is None else rate * tokens

"""What a controller remembers, what it decides, and what a change of policy does to its memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from rematic.control.change import Rejected
from rematic.control.drift import Drift
from rematic.control.gates import Gate, Trial
from rematic.control.observation import Observation
from rematic.control.risk import OK, Evidence, Risk, RiskState, Verdict
from rematic.control.samples import Samples, only

COOL_FACTOR_MAX = 1 << 20
"""A cool-down doubles no further."""

Change = Literal["none", "switch", "rollback"]


class Decision(NamedTuple):
    """What is done after a step."""

    risk: Risk = OK
    """The verdict on the step."""
    settled: Verdict = "ok"
    """The verdict that holds: trouble at once, `ok` after some quiet steps."""
    change: Change = "none"
    """What happens to the policy at the next boundary."""
    policy: str = ""
    """The policy that comes, if one does."""
    rule: str = ""
    """The rule that decided, if anything was."""
    evidence: Evidence = ()
    """The numbers it was applied to."""
    gates: tuple[Gate, ...] = ()
    """The gates of a probation that has ended."""
    release: bool = False
    """Whether cached blocks are released at the next boundary."""
    armed: bool = False
    """Whether the next step is armed for the retry at the op."""
    person: str = ""
    """What a person is asked to decide, if anything."""


class Lengths(NamedTuple):
    """The longest batches lately, in tokens."""

    since: int = 0
    """First step of this stretch, which is as long as a cool-down."""
    longest: int = 0
    """Of this stretch."""
    longest_before: int = 0
    """Of the stretch before it."""


class ControllerState(NamedTuple):
    """What a controller remembers from step to step; the first fields change in every step."""

    policy: str | None = None
    """The policy that was in force; None before the first step."""
    depth: int = 0
    """How many policies could be gone back to."""
    risk: RiskState = RiskState()
    """What verdicts need."""
    settled: Verdict = "ok"
    """The verdict that holds."""
    quiet_steps: int = 0
    """Steps in a row without trouble."""
    trouble_steps: int = 0
    """Steps in a row in which memory was short."""
    num_ooms: int | None = None
    """The allocator's count after the last step."""
    failures: tuple[int, ...] = ()
    """Failed allocations of the last steps, as many as a probation has."""
    samples: Samples = MappingProxyType({})
    """Steps under the policies that matter."""
    lengths: Lengths = Lengths()
    """How long batches are."""
    trial: Trial | None = None
    """The probation that runs."""
    drift: Drift = Drift()
    """How steps under the policy look."""
    judged: Trial | None = None
    """The last probation of the policy in force, which has met its goals; without its steps."""
    awaited: str | None = None
    """A policy that was decided on and is not yet in force."""
    awaited_change: Change = "none"
    """How it comes."""
    awaited_since: int = 0
    """The step of that decision."""
    left: tuple[str, ...] = ()
    """Lighter policies that were left for want of memory, the last one last."""
    cool_until: int = 0
    """The step from which a lighter policy may come back."""
    cool_factor: int = 1
    """By which the next cool-down is multiplied."""
    returned: bool = False
    """Whether a lighter policy has come back since memory was short."""
    switches: tuple[int, ...] = ()
    """Steps at which the controller switched, within the window."""
    releases: tuple[int, ...] = ()
    """Steps at which cached blocks were released, within the window."""
    quarantine: Mapping[tuple[str, int], str] = MappingProxyType({})
    """Why a policy is not to be taken, by policy and `length_bucket`."""
    told: tuple[str, ...] = ()
    """What a person was asked already."""


def is_news(before: ControllerState, decision: Decision) -> bool:
    """Returns whether a decision is worth a line in the journal.

    Args:
        before: The state that it was made from.
        decision: The decision.
    """
    return decision.settled != before.settled or bool(decision.rule or decision.person)


def entered(state: ControllerState, seen: Observation) -> ControllerState:
    """Returns the state when a step ran under another policy than the one before, or a pinned one.

    Args:
        state: The state before that step.
        seen: The step.
    """
    if seen.pinned:
        state = state._replace(trial=None, judged=None, left=(), awaited=None)
    if state.policy is None or (seen.policy == state.policy and seen.depth == state.depth):
        return state._replace(policy=seen.policy, depth=seen.depth)
    old, is_ours = state.policy, seen.policy == state.awaited
    comes_back = is_ours and state.left[-1:] == (seen.policy,)
    if comes_back:
        left = state.left[:-1]
    else:
        left = (*state.left, old) if is_ours and state.awaited_change == "switch" else ()
    is_tried = not (seen.pinned or comes_back or seen.depth <= state.depth)
    quarantine = state.quarantine
    if not is_ours:  # a person who takes a policy has lifted its quarantine
        quarantine = {key: why for key, why in quarantine.items() if key[0] != seen.policy}
    return state._replace(
        policy=seen.policy,
        depth=seen.depth,
        risk=state.risk._replace(retry_streak=0),  # a trend is one under one policy
        samples=only(state.samples, {seen.policy, old, *left}),
        trial=_trial(state, seen, old, for_memory=is_ours) if is_tried else None,
        drift=Drift(),
        judged=None,
        awaited=None,
        left=left,
        returned=state.returned or (comes_back and state.awaited_change == "switch"),
        trouble_steps=0,
        quarantine=quarantine,
    )


def _trial(state: ControllerState, seen: Observation, old: str, *, for_memory: bool) -> Trial:
    return Trial(
        policy=seen.policy,
        previous=old,
        for_memory=for_memory,
        failures_before=sum(state.failures),
    )


def rejected_by(state: ControllerState, policy: str) -> Rejected:
    """Returns why a controller does not take a policy again, for the controllers of other ranks."""
    items = state.quarantine.items()
    return tuple((name, bucket, why) for (name, bucket), why in items if name == policy)


def with_rejected(state: ControllerState, rejected: Rejected) -> ControllerState:
    """Returns the state with what the controller of another rank has rejected."""
    more = {(name, bucket): why for name, bucket, why in rejected}
    return state._replace(quarantine={**more, **state.quarantine})

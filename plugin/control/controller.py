"""The controller: from what was seen of a step to what is done at the next boundary. Pure.

It moves up the ladder when memory has been short for some steps in a row, and down only to where
it came from, when a measured demand fits again and a cool-down has passed that doubles each time
it was too short: so it cannot oscillate.
"""

from __future__ import annotations

from rematic.control.comparison import after_comparison
from rematic.control.controller_state import (
    COOL_FACTOR_MAX,
    ControllerState,
    Decision,
    Lengths,
    entered,
)
from rematic.control.drift import drifted
from rematic.control.gates import Trial, begun_again, early_gates, failed, judge
from rematic.control.goals import ControlRules
from rematic.control.observation import Observation
from rematic.control.risk import (
    TREND_STEPS,
    Risk,
    RiskState,
    Verdict,
    assess,
    is_over_capacity,
    length_bucket,
)
from rematic.control.samples import (
    Sample,
    demand_up_to,
    sample_of,
    usual_rate,
    with_sample,
)

RETURN_SHARE = 0.85
"""A lighter policy comes back if its demand was no more than this share of the limit."""

RELEASE_EVERY_STEPS = 10
"""Cached blocks are released no more often than this."""

RELEASES_MAX = 3
"""Fragmentation after so many releases in a window is answered as pressure, where it costs."""

PERSON_STEPS = 10
"""Steps of trouble in a row, with nothing left to do about it, before a person is asked."""

_QUIET: frozenset[Verdict] = frozenset({"ok", "unknown"})


def decide(
    state: ControllerState, seen: Observation, rules: ControlRules
) -> tuple[ControllerState, Decision]:
    """Returns the state after a step, and what to do.

    Args:
        state: The state before.
        seen: The step.
        rules: What the controller keeps to.
    """
    if seen.policy != state.policy or seen.depth != state.depth or seen.pinned:
        state = entered(state, seen)
    usual = usual_rate(state.samples, seen.policy, seen.length) if is_over_capacity(seen) else None
    risk_state, risk = assess(state.risk, seen, usual_seconds_per_token=usual)
    is_quiet = risk.verdict in _QUIET
    quiet = state.quiet_steps + 1 if is_quiet else 0
    settled = risk.verdict if not is_quiet or quiet >= TREND_STEPS else state.settled
    failures = 0 if seen.is_previous else max(seen.num_failures, _new_ooms(state, seen))
    sample = sample_of(seen, num_failures=failures)
    trial = state.trial
    samples = state.samples
    # neither what was paged out is a baseline, nor what ran under another plan than the policy's
    if not (seen.num_step_retries or seen.is_previous or risk.verdict == "spill"):
        samples = with_sample(samples, seen.policy, sample)
    retries = failures
    if risk_state.retry_streak:  # the allocator's count has risen in this step
        retries += (risk_state.num_alloc_retries or 0) - (state.risk.num_alloc_retries or 0)
    drift, drift_gates = drifted(state.drift, seen, retries)
    state = ControllerState(
        seen.policy,
        seen.depth,
        risk_state,
        settled,
        quiet,
        _trouble_steps(state, risk, risk_state),
        state.num_ooms if seen.num_ooms is None else seen.num_ooms,
        (*state.failures[1 - rules.pace.probation_steps :], failures),
        samples,
        _lengths(state.lengths, seen, rules.pace.cool_down_steps),
        None if trial is None else _tried(trial, seen, sample),
        drift,
        *state[12:],  # three times as fast as `_replace`, in what every step does
    )
    plain = Decision(risk, settled, armed=settled not in _QUIET or drift.is_wary)
    if drift_gates and failed(drift_gates):
        return _reopen(state, seen, rules, plain._replace(gates=drift_gates))
    if is_quiet and trial is None and not state.left:
        return state, plain
    return _act(state, seen, rules, plain)


def _trouble_steps(state: ControllerState, risk: Risk, after: RiskState) -> int:
    if risk.verdict in _QUIET:
        return 0
    if risk.verdict == "fragmentation":
        return state.trouble_steps
    return max(state.trouble_steps + 1, after.retry_streak)  # a trend has lasted some steps already


def _new_ooms(state: ControllerState, seen: Observation) -> int:
    if seen.num_ooms is None or state.num_ooms is None:
        return 0
    return max(0, seen.num_ooms - state.num_ooms)


def _reopen(
    state: ControllerState, seen: Observation, rules: ControlRules, plain: Decision
) -> tuple[ControllerState, Decision]:
    """Puts the policy on probation again: what it was judged by is no longer so."""
    names = ", ".join(gate.name for gate in failed(plain.gates))
    plain = plain._replace(rule=f"what {seen.policy} was judged by has changed ({names})")
    judged = state.judged
    if state.trial is None and judged is not None and rules.adapt and not seen.pinned:
        state = state._replace(trial=judged, judged=None)
    return state, plain


def _lengths(lengths: Lengths, seen: Observation, stretch_steps: int) -> Lengths:
    if seen.step - lengths.since >= stretch_steps:
        return Lengths(seen.step, seen.tokens, lengths.longest)
    if seen.tokens <= lengths.longest:
        return lengths
    return lengths._replace(longest=seen.tokens)


def _tried(trial: Trial, seen: Observation, sample: Sample) -> Trial:
    if seen.comparison is not None:
        trial = after_comparison(trial, seen.comparison, tokens=seen.tokens)
    if seen.is_previous:  # the step was not the policy's
        return trial
    return trial._replace(
        samples=(*trial.samples, sample),
        loss_difference=_larger(trial.loss_difference, seen.loss_difference),
        gradient_difference=_larger(trial.gradient_difference, seen.gradient_difference),
    )


def _larger(one: float | None, other: float | None) -> float | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _act(
    state: ControllerState, seen: Observation, rules: ControlRules, plain: Decision
) -> tuple[ControllerState, Decision]:
    """Answers a step that was troubled, under probation, or under a heavier policy than wanted."""
    window = rules.pace.window_steps
    switches = _within(state.switches, seen.step, window)
    releases = _within(state.releases, seen.step, window)
    if switches is not state.switches or releases is not state.releases:
        state = state._replace(switches=switches, releases=releases)
    if state.awaited is not None:
        if seen.step - state.awaited_since < window:
            return state, plain
        state = state._replace(awaited=None)  # it never came: somebody refused it
    may_change = rules.adapt and not seen.pinned
    if state.trial is not None and may_change:
        state, plain = _end_trial(state, seen, rules, plain)
        if plain.change != "none":
            return state, plain
    if plain.risk.verdict == "fragmentation":
        if rules.can_release and len(state.releases) < RELEASES_MAX:
            return _release(state, seen, plain)
        if _is_hurt(state, seen):
            state = state._replace(trouble_steps=state.trouble_steps + 1)
    if state.trouble_steps >= TREND_STEPS:
        return _escalate(state, seen, rules, plain, may_change=may_change)
    if state.left and state.trial is None and may_change:
        return _return(state, seen, rules, plain)
    return state, plain


def _is_hurt(state: ControllerState, seen: Observation) -> bool:
    """Returns whether holes cost anything: a free list that is merely long is used again."""
    return bool(seen.num_failures or seen.evicted_bytes or state.risk.retry_streak)


def _within(steps: tuple[int, ...], now: int, window: int) -> tuple[int, ...]:
    if not steps or now - steps[0] < window:  # they rise
        return steps
    return tuple(step for step in steps if now - step < window)


def _end_trial(
    state: ControllerState, seen: Observation, rules: ControlRules, plain: Decision
) -> tuple[ControllerState, Decision]:
    """Judges a probation that has run its steps, or that has failed already."""
    trial = state.trial
    assert trial is not None
    if len(trial.samples) < rules.pace.probation_steps:
        gates = tuple(failed(early_gates(trial, rules.goals)))
        if not gates:
            return state, plain
    else:
        gates = judge(trial, state.samples, rules.goals)
    missed = failed(gates)
    state = state._replace(trial=None)
    if not missed:
        rule = f"{trial.policy} has met its goals"
        state = state._replace(judged=begun_again(trial))
        return state, plain._replace(rule=rule, gates=gates)
    why = ", ".join(gate.name for gate in missed)
    buckets = {length_bucket(sample.length) for sample in trial.samples}
    state = state._replace(
        quarantine={**state.quarantine, **{(trial.policy, bucket): why for bucket in buckets}},
        awaited=trial.previous,
        awaited_change="rollback",
        awaited_since=seen.step,
    )
    rule = f"{trial.policy} has not met its goals ({why})"
    return state, plain._replace(change="rollback", policy=trial.previous, rule=rule, gates=gates)


def _release(
    state: ControllerState, seen: Observation, plain: Decision
) -> tuple[ControllerState, Decision]:
    if state.releases and seen.step - state.releases[-1] < RELEASE_EVERY_STEPS:
        return state, plain
    state = state._replace(releases=(*state.releases, seen.step))
    rule = "memory is in pieces: cached blocks are released"
    return state, plain._replace(release=True, rule=rule, evidence=plain.risk.evidence)


def _escalate(
    state: ControllerState,
    seen: Observation,
    rules: ControlRules,
    plain: Decision,
    *,
    may_change: bool,
) -> tuple[ControllerState, Decision]:
    """Takes the next heavier policy that is allowed; asks a person where there is none."""
    target, obstacle = _heavier(state, seen, rules)
    if not may_change:
        target = None
        obstacle = "the policy is pinned" if seen.pinned else "changes are off (`control.adapt`)"
    if target is not None and len(state.switches) >= rules.goals.switches_max:
        target = None
        obstacle = f"{len(state.switches)} switches in {rules.pace.window_steps} steps are the most"
    if target is None:
        return _ask(state, seen, plain, obstacle)
    too_early = state.returned
    factor = min(2 * state.cool_factor, COOL_FACTOR_MAX) if too_early else state.cool_factor
    state = state._replace(
        awaited=target,
        awaited_change="switch",
        awaited_since=seen.step,
        trial=None,
        switches=(*state.switches, seen.step),
        releases=(),
        cool_factor=factor,
        cool_until=seen.step + factor * rules.pace.cool_down_steps,
        returned=False,
    )
    rule = f"{plain.risk.verdict} in {state.trouble_steps} steps in a row: {plain.risk.rule}"
    return state, plain._replace(
        change="switch", policy=target, rule=rule, evidence=plain.risk.evidence
    )


def _heavier(
    state: ControllerState, seen: Observation, rules: ControlRules
) -> tuple[str | None, str]:
    """Returns the next heavier policy, or None and why there is none."""
    if seen.policy not in rules.ladder:
        return None, f"{seen.policy!r} is not on the ladder {', '.join(rules.ladder) or '(empty)'}"
    bucket = length_bucket(seen.length)
    for name in rules.ladder[rules.ladder.index(seen.policy) + 1 :]:
        if (name, bucket) not in state.quarantine:
            return name, ""
    return None, "every heavier policy has failed at this length, or there is none"


def _ask(
    state: ControllerState, seen: Observation, plain: Decision, obstacle: str
) -> tuple[ControllerState, Decision]:
    """Asks a person, once for each kind of trouble under each policy."""
    topic = f"{plain.risk.verdict} under {seen.policy}"
    if state.trouble_steps < PERSON_STEPS or topic in state.told:
        return state, plain
    person = (
        f"{plain.risk.verdict} under policy {seen.policy!r} in {state.trouble_steps} steps in a "
        f"row ({plain.risk.rule}), and nothing heavier is taken: {obstacle}. Raise the budget, "
        "shorten the sequences, or pin a policy."
    )
    state = state._replace(told=(*state.told, topic))
    return state, plain._replace(person=person, rule=obstacle, evidence=plain.risk.evidence)


def need_of(state: ControllerState, policy: str, limit_bytes: int | None) -> str | None:
    """Returns why a policy that was left for want of memory must not come back; None if it may.

    Args:
        state: The state of a controller.
        policy: Name of a policy that the controller of another rank would take.
        limit_bytes: The most that may be in use on this rank, None without a limit.
    """
    if policy not in state.left or limit_bytes is None:
        return None
    demand = demand_up_to(
        state.samples, policy, max(state.lengths.longest, state.lengths.longest_before)
    )
    if demand is not None and demand <= RETURN_SHARE * limit_bytes:
        return None
    return f"{policy} was left for want of memory on this rank, and does not fit yet"


def _return(
    state: ControllerState, seen: Observation, rules: ControlRules, plain: Decision
) -> tuple[ControllerState, Decision]:
    """Takes back the lighter policy that was left, if its demand at these lengths fits again."""
    if seen.step < state.cool_until or len(state.switches) >= rules.goals.switches_max:
        return state, plain
    if state.quiet_steps < TREND_STEPS or seen.limit_bytes is None:
        return state, plain
    lighter = state.left[-1]
    tokens = max(state.lengths.longest, state.lengths.longest_before)
    demand = demand_up_to(state.samples, lighter, tokens)
    if demand is None or demand > RETURN_SHARE * seen.limit_bytes:
        return state, plain
    state = state._replace(
        awaited=lighter,
        awaited_change="switch",
        awaited_since=seen.step,
        switches=(*state.switches, seen.step),
        cool_until=seen.step + state.cool_factor * rules.pace.cool_down_steps,
    )
    return state, plain._replace(
        change="switch",
        policy=lighter,
        rule=f"{lighter} was left for want of memory and fits again",
        evidence=(
            ("demand_bytes", demand),
            ("limit_bytes", seen.limit_bytes),
            ("tokens", tokens),
        ),
    )

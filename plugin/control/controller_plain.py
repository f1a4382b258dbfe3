"""A controller's state and decisions as plain types, for checkpoints and the journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rematic.control.controller_state import ControllerState, Decision, Lengths
from rematic.control.drift import Drift, Stretch
from rematic.control.gates import Gate, Trial
from rematic.control.goals import ControlRules, Goals, Pace
from rematic.control.risk import RiskState
from rematic.control.samples import Sample


def controller_to_plain(state: ControllerState) -> dict[str, Any]:
    """Returns the state as dictionaries, lists, strings and numbers."""
    trial = state.trial
    return {
        **{name: _listed(value) for name, value in state._asdict().items() if name not in _OWN},
        "risk": list(state.risk),
        "lengths": list(state.lengths),
        "samples": [
            [policy, bucket, [list(sample) for sample in kept]]
            for (policy, bucket), kept in state.samples.items()
        ],
        "trial": None if trial is None else _trial_to_plain(trial),
        "judged": None if state.judged is None else _trial_to_plain(state.judged),
        "drift": _drift_to_plain(state.drift),
        "quarantine": [[*key, why] for key, why in state.quarantine.items()],
    }


def controller_from_plain(plain: Mapping[str, Any]) -> ControllerState:
    """Returns the state that `controller_to_plain` wrote."""
    simple: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in plain.items()
        if name not in _OWN
    }
    trial, judged = plain["trial"], plain["judged"]
    return ControllerState(
        **simple,
        risk=RiskState(*plain["risk"]),
        lengths=Lengths(*plain["lengths"]),
        samples={
            (policy, bucket): tuple(Sample(*sample) for sample in kept)
            for policy, bucket, kept in plain["samples"]
        },
        trial=None if trial is None else _trial_from_plain(trial),
        judged=None if judged is None else _trial_from_plain(judged),
        drift=_drift_from_plain(plain["drift"]),
        quarantine={(policy, bucket): why for policy, bucket, why in plain["quarantine"]},
    )


_OWN = frozenset({"risk", "lengths", "samples", "trial", "judged", "drift", "quarantine"})
"""Fields with a form of their own."""


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _trial_to_plain(trial: Trial) -> dict[str, Any]:
    return {**trial._asdict(), "samples": [list(sample) for sample in trial.samples]}


def _trial_from_plain(plain: Mapping[str, Any]) -> Trial:
    return Trial(**{**plain, "samples": tuple(Sample(*sample) for sample in plain["samples"])})


def _drift_to_plain(drift: Drift) -> dict[str, Any]:
    baseline = None if drift.baseline is None else list(drift.baseline)
    return {**drift._asdict(), "baseline": baseline}


def _drift_from_plain(plain: Mapping[str, Any]) -> Drift:
    baseline = plain["baseline"]
    return Drift(**{**plain, "baseline": None if baseline is None else Stretch(*baseline)})


def rules_to_plain(rules: ControlRules) -> dict[str, Any]:
    """Returns what a controller keeps to in plain types."""
    return {**dataclasses.asdict(rules), "ladder": list(rules.ladder)}


def rules_from_plain(plain: Mapping[str, Any]) -> ControlRules:
    """Returns the rules that `rules_to_plain` wrote."""
    return ControlRules(
        goals=Goals(**plain["goals"]),
        pace=Pace(**plain["pace"]),
        ladder=tuple(plain["ladder"]),
        adapt=plain["adapt"],
        can_release=plain["can_release"],
    )


def decision_to_plain(decision: Decision) -> dict[str, Any]:
    """Returns a decision as the journal holds it."""
    return {
        "verdict": decision.risk.verdict,
        "settled": decision.settled,
        "change": decision.change,
        "policy": decision.policy,
        "rule": decision.rule or decision.risk.rule,
        "evidence": dict(decision.evidence or decision.risk.evidence),
        "gates": [gate_to_plain(gate) for gate in decision.gates],
        "release": decision.release,
        "armed": decision.armed,
        "person": decision.person,
    }


def gate_to_plain(gate: Gate) -> dict[str, Any]:
    """Returns a gate as a mapping."""
    return gate._asdict()

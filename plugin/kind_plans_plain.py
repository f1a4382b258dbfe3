"""What was learned of kinds of steps as plain types, for checkpoints.

Profiles are not saved: a trace takes a second or two, and is made again when memory is short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rematic.batch_shape import BatchShape
from rematic.control import ForecastErrors
from rematic.cost.live_profile import StepKind
from rematic.kind_plans import KindPlans, Sample
from rematic.policy import Plan, action_from_plain, action_to_plain


def kinds_to_plain(kinds: Mapping[StepKind, KindPlans]) -> list[dict[str, Any]]:
    """Returns kinds of steps with what was learned of them as lists, strings and numbers."""
    return [
        {
            "kind": {
                **vars(kind),
                "inputs": [list(pair) for pair in kind.inputs],
                "autocast": None,
            },
            "num_samples": plans.num_samples,
            "num_watched": plans.num_watched,
            "num_proofs": plans.num_proofs,
            "highest_bytes": plans.highest_bytes,
            "most_hole_bytes": plans.most_hole_bytes,
            "num_losses": plans.num_losses,
            "is_refused": plans.is_refused,
            "sample": None if plans.sample is None else _sample_to_plain(plans.sample),
            "errors": _errors_to_plain(plans.errors),
        }
        for kind, plans in kinds.items()
    ]


def kinds_from_plain(plain: Iterable[Mapping[str, Any]]) -> dict[StepKind, KindPlans]:
    """Returns the kinds that `kinds_to_plain` wrote."""
    kinds = {}
    for one in plain:
        inputs = tuple((name, dims) for name, dims in one["kind"]["inputs"])
        kind = StepKind(**{**one["kind"], "inputs": inputs})
        sample = one["sample"]
        kinds[kind] = KindPlans(
            num_samples=one["num_samples"],
            num_watched=one["num_watched"],
            num_proofs=one["num_proofs"],
            highest_bytes=one["highest_bytes"],
            most_hole_bytes=one["most_hole_bytes"],
            num_losses=one["num_losses"],
            is_refused=one["is_refused"],
            sample=None if sample is None else _sample_from_plain(sample),
            errors=_errors_from_plain(one["errors"]),
        )
    return kinds


def _sample_to_plain(sample: Sample) -> dict[str, Any]:
    autocast = None if sample.autocast is None else str(sample.autocast).removeprefix("torch.")
    return {
        "shape": dict(vars(sample.shape)),
        "plan": [action_to_plain(action) for action in sample.plan.actions],
        "rise_bytes": sample.rise_bytes,
        "autocast": autocast,
    }


def _sample_from_plain(plain: Mapping[str, Any]) -> Sample:
    autocast = plain["autocast"]
    return Sample(
        shape=BatchShape(**plain["shape"]),
        plan=Plan(actions=tuple(action_from_plain(action) for action in plain["plan"])),
        rise_bytes=plain["rise_bytes"],
        autocast=None if autocast is None else getattr(torch, autocast),
    )


def _errors_to_plain(errors: ForecastErrors) -> dict[str, Any]:
    values = dataclasses.asdict(errors)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _errors_from_plain(plain: Mapping[str, Any]) -> ForecastErrors:
    return ForecastErrors(
        shares=tuple(plain["shares"]), speeds=tuple(plain["speeds"]), speed=plain["speed"]
    )

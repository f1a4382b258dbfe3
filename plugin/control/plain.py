"""The controller's state as plain types, for checkpoints that load under `weights_only`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rematic.control.curve import Curve
from rematic.control.history import History, HistoryEntry
from rematic.control.step_plan import Costs, StepOutcome, StepRequest
from rematic.policy import policy_from_plain, policy_to_plain


def costs_to_plain(costs: Costs) -> dict[str, Any]:
    """Returns learned costs as dictionaries, lists and numbers."""
    return {
        "kept": {name: _points(curve) for name, curve in costs.kept},
        "unit_transient": _points(costs.unit_transient),
        "head_transient": _points(costs.head_transient),
        "backward_transient": _points(costs.backward_transient),
        "longest": costs.longest,
        "margin_bytes": costs.margin_bytes,
        "surprised": costs.surprised,
    }


def costs_from_plain(plain: Mapping[str, Any]) -> Costs:
    """Returns the costs that `costs_to_plain` wrote."""
    return Costs(
        kept=tuple((name, _curve(points)) for name, points in plain["kept"].items()),
        unit_transient=_curve(plain["unit_transient"]),
        head_transient=_curve(plain["head_transient"]),
        backward_transient=_curve(plain["backward_transient"]),
        longest=plain["longest"],
        margin_bytes=plain["margin_bytes"],
        surprised=plain["surprised"],
    )


def learned_to_plain(request: StepRequest | None, outcome: StepOutcome) -> dict[str, Any]:
    """Returns what a step was planned from and what was learned from it, for the journal.

    Args:
        request: What was known before the step; None if it was not planned.
        outcome: What it measured.
    """
    pending = None if request is None else request.pending_gradient_bytes
    return {
        "pending_gradient_bytes": pending,
        "learned": {
            "kept": dict(outcome.kept_bytes),  # of several units of a class the last one counts
            "unit": outcome.unit_transient_bytes,
            "head": outcome.head_transient_bytes,
            "backward": outcome.backward_transient_bytes,
            "missing": outcome.missing_bytes,
            "surprising": outcome.surprising,
        },
    }


def outcome_from_plain(event: Mapping[str, Any]) -> StepOutcome:
    """Returns what a `step` event says was learned."""
    learned = event["learned"]
    return StepOutcome(
        tokens=event["tokens"],
        length=event["length"],
        kept_bytes=tuple(learned["kept"].items()),
        unit_transient_bytes=learned["unit"],
        head_transient_bytes=learned["head"],
        backward_transient_bytes=learned["backward"],
        missing_bytes=learned["missing"],
        surprising=learned["surprising"],
    )


def history_to_plain(history: History) -> dict[str, Any]:
    """Returns the history of policies as dictionaries, lists and strings."""
    return {
        "entries": [
            {"policy": policy_to_plain(e.policy), "step": e.step, "reason": e.reason}
            for e in history.entries
        ],
        "pinned": history.pinned,
    }


def history_from_plain(plain: Mapping[str, Any]) -> History:
    """Returns the history that `history_to_plain` wrote."""
    return History(
        entries=tuple(
            HistoryEntry(policy=policy_from_plain(e["policy"]), step=e["step"], reason=e["reason"])
            for e in plain["entries"]
        ),
        pinned=plain["pinned"],
    )


def _points(curve: Curve) -> list[list[int]]:
    return [list(point) for point in curve.points]


def _curve(points: list[list[int]]) -> Curve:
    return Curve(points=tuple((tokens, num_bytes) for tokens, num_bytes in points))

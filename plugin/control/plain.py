"""The controller's state as plain types, for checkpoints that load under `weights_only`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rematic.control.curve import Curve
from rematic.control.history import History, HistoryEntry
from rematic.control.step_plan import Costs
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

"""The figures of finished steps, as numbers for the trackers of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rematic.step_record import StepRecord

PREFIX = "rematic/"
"""Before the name of every figure, so that none hides one of the user's."""


LEVELS = {"keep": 0, "selective": 1, "tile": 1, "recompute": 2}
"""How much of a unit's activations an action gives up; every other one moves or loses them."""

HIGHEST_LEVEL = 3


def policy_level(plan: Mapping[str, int]) -> float:
    """Returns the mean level of the units: 0 where all are kept, 2 where all are recomputed.

    Args:
        plan: Number of units by action.
    """
    levels = [LEVELS.get(action, HIGHEST_LEVEL) * number for action, number in plan.items()]
    return sum(levels) / max(1, sum(plan.values()))


@dataclass(kw_only=True)
class StepFigures:
    """What the steps since the last report took; the sums of the journal's `step` events."""

    records: list[StepRecord] = field(default_factory=list)
    """The steps."""

    def add(self, record: StepRecord) -> None:
        """Takes a finished step."""
        self.records.append(record)

    def take(self) -> dict[str, float]:
        """Returns the figures since the last call; nothing if there was no step.

        Bytes are the highest of the steps, units those of the last one, the rest is added up.
        """
        records, self.records = self.records, []
        if not records:
            return {}
        figures: dict[str, float] = {
            "steps": len(records),
            "seconds": sum(r.seconds for r in records),
            "evictions": sum(r.evictions for r in records),
            "evicted_bytes": sum(r.evicted_bytes for r in records),
            "op_retries": sum(r.op_retries for r in records),
            "unit_retries": sum(r.unit_retries for r in records),
            "step_retries": sum(r.step_retries for r in records),
            "replays": sum(r.replays for r in records),
        }
        for name in ("peak_bytes", "predicted_peak_bytes", "budget_bytes"):
            known = [v for v in (getattr(r, name) for r in records) if v is not None]
            if known:
                figures[name] = max(known)
        figures["policy_level"] = policy_level(records[-1].plan)
        for action, num_units in records[-1].plan.items():
            figures[f"units/{action}"] = num_units
        return {PREFIX + name: value for name, value in figures.items()}

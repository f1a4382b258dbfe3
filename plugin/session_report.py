"""The table of a session: what was declared and what was measured, unit by unit."""

from __future__ import annotations

from rematic.activations import Engine
from rematic.byte_sizes import format_bytes
from rematic.policy import Action, Policy
from rematic.step_record import StepRecord

_HEADER = ("unit", "class", "declared", "forwards", "replays", "retries", "note")


def format_session_report(
    engine: Engine,
    policy: Policy,
    actions: tuple[Action | None, ...],
    last_step: StepRecord | None,
) -> str:
    """Returns the table as text, one line for each unit and a last one for the step."""
    rows = [_HEADER]
    for unit, action in zip(engine.units, actions, strict=True):
        rows.append(
            (
                unit.name,
                engine.classes[unit.name],
                "planned" if action is None else action.name,
                str(unit.num_forwards),
                str(engine.ledger.counts.replays[unit.name]),
                str(unit.num_retries),
                unit.pinned or "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(row) for row in padded]
    return "\n".join(
        [f"policy {policy.name}", *(line.rstrip() for line in lines), _last(last_step)]
    )


def _last(step: StepRecord | None) -> str:
    if step is None:
        return "no step yet"
    return (
        f"last step {step.step}: {step.batch} x {step.length} tokens, plan {step.plan}, "
        f"peak {_bytes(step.peak_bytes)} read at {step.peak_source}, predicted "
        f"{_bytes(step.predicted_peak_bytes)}, budget {_bytes(step.budget_bytes)}"
    )


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)

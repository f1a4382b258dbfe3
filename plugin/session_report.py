"""The table of a session: what was declared and what was measured, unit by unit."""

from __future__ import annotations

from rematic.activations import Engine
from rematic.byte_sizes import format_bytes
from rematic.journal import describe_plan, text_table
from rematic.policy import Action, Policy
from rematic.step_record import StepRecord

_HEADERS = ("unit", "class", "declared", "forwards", "replays", "retries", "note")


def format_session_report(
    engine: Engine,
    policy: Policy,
    actions: tuple[Action | None, ...],
    last_step: StepRecord | None,
) -> str:
    """Returns the table as text, one line for each unit and a last one for the step."""
    rows = [
        (
            unit.name,
            engine.classes[unit.name],
            "planned" if action is None else action.name,
            str(unit.num_forwards),
            str(engine.ledger.counts.replays[unit.name]),
            str(unit.num_retries),
            unit.pinned or (unit.tiling.objection if unit.tiling else None) or "",
        )
        for unit, action in zip(engine.units, actions, strict=True)
    ]
    return "\n".join([f"policy {policy.name}", text_table(_HEADERS, rows), _last(last_step)])


def _last(step: StepRecord | None) -> str:
    if step is None:
        return "no step yet"
    return (
        f"last step {step.step}: {step.batch} x {step.length} tokens, plan "
        f"{describe_plan(step.plan)}, peak {format_bytes(step.peak_bytes)} read at "
        f"{step.peak_source}, predicted {format_bytes(step.predicted_peak_bytes)}, "
        f"budget {format_bytes(step.budget_bytes)}"
    )

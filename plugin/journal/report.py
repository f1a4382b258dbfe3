"""Prints a run as a person reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rematic.byte_sizes import format_bytes
from rematic.journal.summary import Event, PlanSummary, RunSummary, summarize
from rematic.journal.table import text_table

_UNITS_NAMED = 3
"""How many units a line names."""
PLAN_HEADERS = ("policy", "plan", "steps", "length", "tokens", "seconds", "tokens/s", "peak")


def format_report(events: Iterable[Event]) -> str:
    """The events of one run as text: what ran, at which cost, and what had to be done for it."""
    return format_summary(summarize(events))


def format_summary(summary: RunSummary) -> str:
    """The summary of a run as text."""
    parts = [*_heading(summary), "", *_plans(summary), "", *_figures(summary)]
    return "\n".join([*parts, *_notices(summary)])


def _heading(summary: RunSummary) -> list[str]:
    reason = f" ({summary.reason})" if summary.reason else ""
    lines = [f"run {summary.name or 'without a name'}: {summary.status}{reason}"]
    if summary.recipe:
        lines.append(f"recipe {summary.recipe}")
    if summary.corpus_sha256:
        lines.append(f"corpus sha256 {summary.corpus_sha256[:16]}")
    if summary.versions:
        lines.append(", ".join(f"{name} {version}" for name, version in summary.versions.items()))
    return lines


def _plans(summary: RunSummary) -> list[str]:
    if not summary.plans:
        return ["no step was finished"]
    rows = [_plan_row(plan) for plan in summary.plans]
    if len(rows) > 1:
        rows.append(_plan_row(_total_of(summary.plans)))
    return [text_table(PLAN_HEADERS, rows)]


def _plan_row(plan: PlanSummary) -> list[str]:
    lengths = {plan.min_length, plan.max_length}
    return [
        plan.policy,
        plan.plan,
        str(plan.steps),
        " to ".join(map(str, sorted(lengths))),
        f"{plan.tokens:,}",
        f"{plan.seconds:.2f}",
        _rate(plan.tokens / plan.seconds if plan.seconds else None),
        format_bytes(plan.peak_bytes),
    ]


def _total_of(plans: Sequence[PlanSummary]) -> PlanSummary:
    return dataclasses.replace(
        plans[0],
        policy="all",
        plan="",
        steps=sum(plan.steps for plan in plans),
        tokens=sum(plan.tokens for plan in plans),
        min_length=min(plan.min_length for plan in plans),
        max_length=max(plan.max_length for plan in plans),
        seconds=sum(plan.seconds for plan in plans),
        peak_bytes=max((p.peak_bytes for p in plans if p.peak_bytes is not None), default=None),
    )


def _figures(summary: RunSummary) -> list[str]:
    return [
        _memory(summary),
        f"evictions         {summary.evictions} ({format_bytes(summary.evicted_bytes)} freed)",
        f"retries           {summary.op_retries} of one op, {summary.unit_retries} of one unit, "
        f"{summary.step_retries} of a whole step",
        f"replays           {summary.replays}",
        f"policy changes    {summary.switches}, taken back {summary.rollbacks}",
        _predictions(summary),
        f"batches lost      {summary.batches_lost}",
        f"tokens/s          {_rate(summary.tokens_per_second)}",
        *([f"last loss         {summary.last_loss:.4f}"] if summary.last_loss is not None else []),
        *([f"checkpoint        {summary.checkpoint}"] if summary.checkpoint else []),
    ]


def _notices(summary: RunSummary) -> list[str]:
    lines = [
        ", ".join(unit or "the model" for unit in notice.units[:_UNITS_NAMED])
        + (f" and {len(notice.units) - _UNITS_NAMED} more" * (len(notice.units) > _UNITS_NAMED))
        + f" ({notice.kind}): {notice.text}"
        for notice in summary.notices
    ]
    return ["", *lines] if lines else []


def _memory(summary: RunSummary) -> str:
    line = f"peak              {format_bytes(summary.peak_bytes)}"
    if summary.budget_bytes is None:
        return f"{line}, no budget"
    line += f" of {format_bytes(summary.budget_bytes)}"
    if summary.peak_bytes is not None:
        line += f" ({summary.peak_bytes / summary.budget_bytes:.1%}), at step {summary.peak_step}"
    if summary.steps_over_budget:
        line += f"; {summary.steps_over_budget} steps above their budget"
    return line


def _predictions(summary: RunSummary) -> str:
    if summary.prediction_error_median is None or summary.prediction_error_max is None:
        return "prediction error  no step was predicted, measured and left alone"
    return (
        f"prediction error  median {summary.prediction_error_median:.2%}, "
        f"max {summary.prediction_error_max:.2%}, over {summary.predictions} steps"
    )


def _rate(tokens_per_second: float | None) -> str:
    return "unknown" if tokens_per_second is None else f"{tokens_per_second:,.0f}"

"""What a run says when a micro-batch does not fit in any way that is allowed. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from rematic.byte_sizes import format_bytes
from rematic.control.step_plan import Costs, StepRequest, plan_step
from rematic.policy import Recompute


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """One attempt that ran out of memory."""

    name: str
    """The policy or the way to run it."""

    needed_bytes: int | None
    """Bytes in use when an allocation failed, and those it asked for; None if unknown."""

    error: str
    """What failed, in the words of the allocator."""

    where: str
    """The line of code that was running."""


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """Why a micro-batch was given up."""

    batch: int | None
    """Sequences; None where it is no batch that does not fit."""

    length: int | None
    """Tokens of each; None likewise."""

    budget_bytes: int | None
    """Bytes that might be in use."""

    attempts: tuple[FailedAttempt, ...]
    """Every attempt, the first one first."""

    obstacle: str | None
    """What kept the step from being tried again, None if nothing did."""

    largest_length: int | None
    """The longest sequences, so many in a batch, that are expected to fit; None if unknown."""

    resident_bytes: tuple[tuple[str, int], ...]
    """What stays in use between steps, by kind."""

    usable_bytes: int | None = None
    """What the device or the system had left of the budget; None if not known."""

    num_torn_gradients: int = 0
    """Gradients of earlier micro-batches that hold a part of this one."""

    checkpoint: str | None = None
    """Where the training was saved before it stopped, None for nowhere."""

    not_saved: str | None = None
    """Why it was not saved, None if it was or if the host gave no reason."""

    num_unsaved_steps: int = 0
    """Micro-batches since the last optimizer step that went well: a checkpoint holds no gradients,
    so they come again."""

    memory_snapshot: str | None = None
    """The file with what the device's allocator held then, None for none."""

    advice: tuple[str, ...] = ()
    """What to change."""

    def to_plain(self) -> dict[str, Any]:
        """Returns the report in plain types."""
        return {**dataclasses.asdict(self), "resident_bytes": dict(self.resident_bytes)}


def largest_length(costs: Costs, request: StepRequest) -> int | None:
    """Returns the longest sequences that are expected to fit if every unit is recomputed.

    So many in a batch as in `request`; None where nothing was measured yet or there is no budget.
    """
    num_sequences = max(1, request.tokens // max(request.length, 1))
    low, high = 0, request.length
    if request.budget_bytes is None or _peak(costs, request, length=1, batch=1) is None:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        peak = _peak(costs, request, length=middle, batch=num_sequences)
        if peak is not None and peak <= request.budget_bytes * (1 - request.reserve):
            low = middle
        else:
            high = middle - 1
    return low


def _peak(costs: Costs, request: StepRequest, *, length: int, batch: int) -> int | None:
    recomputed = (Recompute(),) * len(request.actions)
    asked = replace(request, actions=recomputed, tokens=length * batch, length=length)
    return plan_step(costs, asked).predicted_peak_bytes


def format_stop(report: StopReport) -> str:
    """Returns the report as a text that callers who shrink batches recognise.

    (Where nothing was tried, a person must decide, and no smaller batch would help.)
    """
    if not report.attempts:
        return f"the training was stopped between two steps: {report.obstacle}"
    tried = "; ".join(_attempt(attempt) for attempt in report.attempts)
    # 1 x 1: nothing in the batch told its shape
    is_known = (report.batch or 1) * (report.length or 1) > 1
    size = f" of {report.batch} x {report.length} tokens" if is_known else ""
    parts = [
        f"a batch{size} ran out of memory. Tried: {tried}.",
        f"{report.attempts[-1].error} (at {report.attempts[-1].where}).",
    ]
    if report.budget_bytes is not None:
        parts.append(f"The budget is {format_bytes(report.budget_bytes)}{_shortened(report)}.")
    if report.obstacle is not None:
        parts.append(f"It was not tried again: {report.obstacle}")
    if report.num_torn_gradients:
        parts.append(
            f"{report.num_torn_gradients} gradients of earlier micro-batches hold a part of this "
            "one: call `zero_grad` before going on."
        )
    if report.largest_length and is_known:
        parts.append(f"Sequences of up to {report.largest_length} tokens are expected to fit.")
    parts.extend(_saved(report))
    if report.memory_snapshot is not None:
        parts.append(f"What the device held is in {report.memory_snapshot}.")
    return " ".join([*parts, *report.advice])


def _saved(report: StopReport) -> list[str]:
    if report.not_saved is not None:
        return [f"The training could not be saved ({report.not_saved})."]
    if report.checkpoint is None:
        return []
    text = f"The training was saved to {report.checkpoint}"
    if not report.num_unsaved_steps:
        return [f"{text}."]
    return [
        f"{text}, as it was behind the last optimizer step: {report.num_unsaved_steps} micro-"
        "batches since then come again when it is resumed."
    ]


def _shortened(report: StopReport) -> str:
    usable, budget = report.usable_bytes, report.budget_bytes
    if usable is None or budget is None or usable >= budget:
        return ""
    return (
        f", but only {format_bytes(usable)} could be in use: what this process holds beside "
        "tensors, or what other programs hold, takes the rest"
    )


def _attempt(attempt: FailedAttempt) -> str:
    if attempt.needed_bytes is None:
        return attempt.name
    return f"{attempt.name} (needed {format_bytes(attempt.needed_bytes)})"


def advise(
    *, may_tile: bool, may_compress: bool, split_by: str | None, head_is_peak: bool
) -> tuple[str, ...]:
    """Returns what a person can change, what helps most first.

    Args:
        may_tile: Whether token-wise parts may run in slices already.
        may_compress: Whether lossy actions are allowed already.
        split_by: The call that takes how the loss combines sequences; None: batches are split
            already, or cannot be.
        head_is_peak: Whether head and loss need more than any unit.
    """
    advice = ["Shorten the sequences, take fewer in a batch, or raise the budget."]
    if head_is_peak:
        advice.insert(0, "Most of it is needed by head and loss: use a tiled loss.")
    if not may_tile:
        advice.append(
            "`policy: {allow_tile: true}` permits MLPs and norms in slices of the sequence, which "
            "adds up in another order."
        )
    if not may_compress:
        advice.append("`policy: {allow_lossy: true}` permits 8-bit activations, which are lossy.")
    if split_by is not None:
        advice.append(
            f"`control: {{allow_split: true}}` with `{split_by}` permits smaller micro-batches."
        )
    return tuple(advice)

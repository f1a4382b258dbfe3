"""Adds the events of a run up to the figures that a person or a script asks for."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rematic.control import EXACT_SOURCE
from rematic.journal.notice_summary import NoticeSummary, summarize_notices

Event = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """The steps that ran under one policy with one mix of actions."""

    policy: str
    """Name of the policy."""
    plan: str
    """How many units each action had, as `keep 5, recompute 3`."""
    steps: int
    """Micro-batches."""
    tokens: int
    """Tokens of those micro-batches."""
    min_length: int
    """Shortest batch, in tokens."""
    max_length: int
    """Longest batch, in tokens."""
    seconds: float
    """Time of forward and backward of those steps together, in seconds."""
    peak_bytes: int | None
    """Highest memory in use of those steps, in bytes; None where the probe could not tell."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run in figures. Each is counted from the journal, resumed parts included."""

    name: str | None
    """Name of the run."""
    recipe: str | None
    """Name of the recipe."""
    status: str
    """`finished`, `interrupted`, `failed`, or `unfinished`: running, or killed."""
    reason: str | None
    """Why it ended as it did."""
    corpus_sha256: str | None
    """Hash of the training data."""
    versions: Mapping[str, str]
    """Versions of the packages that trained."""
    steps: int
    """Micro-batches trained."""
    batches_lost: int
    """Micro-batches that were begun and given up."""
    tokens: int
    """Tokens trained."""
    seconds: float
    """Time of forward and backward of those steps together, in seconds."""
    tokens_per_second: float | None
    """Tokens trained over that time."""
    budget_bytes: int | None
    """Bytes that may be in use, in the last step."""
    peak_bytes: int | None
    """Highest memory in use of any step, in bytes."""
    peak_step: int | None
    """The step that had it."""
    steps_over_budget: int
    """Steps whose peak was above the budget of that step."""
    evictions: int
    """Evictions of records inside steps."""
    evicted_bytes: int
    """Bytes that those evictions freed."""
    op_retries: int
    """Failed allocations that the retry of one op answered."""
    unit_retries: int
    """Failed allocations that the retry of one unit answered."""
    step_retries: int
    """Micro-batches that ran again as a whole, each time counted."""
    replays: int
    """Forward passes of units that backward asked for again."""
    switches: int
    """Policy changes."""
    rollbacks: int
    """Policy changes taken back."""
    predictions: int
    """Steps whose peak was predicted, not lowered by an eviction or a retry, and either read after
    every op or higher than predicted."""
    prediction_error_median: float | None
    """Median of |predicted - measured| / measured peak."""
    prediction_error_max: float | None
    """Largest |predicted - measured| / measured peak."""
    last_loss: float | None
    """Loss of the last step."""
    checkpoint: str | None
    """Path of the last checkpoint."""
    plans: tuple[PlanSummary, ...]
    """The same steps by policy and plan, in the order in which these first appeared."""
    notices: tuple[NoticeSummary, ...]
    """What was found out about units, in the order in which it was."""

    def to_dict(self) -> dict[str, object]:
        """The summary as plain values, as `--json` prints it."""
        return dataclasses.asdict(self)


def summarize(events: Iterable[Event]) -> RunSummary:
    """Adds up the events of one run.

    A run that was killed and resumed trains the steps after its last checkpoint a second time;
    only the second time counts.

    Args:
        events: The events in the order in which they were written.
    """
    tally = _Tally()
    for event in events:
        tally.add(event)
    return tally.summary()


_READ = (
    *("step", "policy", "plan", "length", "tokens", "seconds"),
    *("peak_bytes", "peak_source", "predicted_peak_bytes", "budget_bytes"),
    *("evictions", "evicted_bytes"),
    *("op_retries", "unit_retries", "step_retries", "replays"),
)
"""What is read of a step; the rest of it is not kept, since a long run has many."""


@dataclass
class _Tally:
    """What has been read so far."""

    start: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    steps: list[Event] = field(default_factory=list)
    given_up: list[Event] = field(default_factory=list)
    notices: list[Event] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    checkpoint: str | None = None
    last_loss: float | None = None

    def add(self, event: Event) -> None:
        kind = str(event.get("event"))
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if kind == "run_start":
            self._begin(event)
        elif kind == "step":
            self.steps.append({name: event[name] for name in _READ if name in event})
        elif kind == "stop" and event.get("batch", ...) is not None:  # else between two steps
            self.given_up.append(event)
        elif kind == "notice":
            self.notices.append(event)
        elif kind == "checkpoint":
            self.checkpoint = _text(event, "path")
        elif kind == "run_end":
            self.end = event
            loss = _optional_number(event, "last_loss")
            self.last_loss = self.last_loss if loss is None else loss

    def _begin(self, event: Event) -> None:
        self.start, self.end = event, {}
        resumed_after = event.get("resumed_after_step")
        if isinstance(resumed_after, int):
            self.steps = [s for s in self.steps if _count(s, "step") <= resumed_after]
            self.given_up = [s for s in self.given_up if _count(s, "step") <= resumed_after]

    def summary(self) -> RunSummary:
        steps = self.steps
        tokens, seconds = _total(steps, "tokens"), _seconds(steps)
        errors = [error for step in steps if (error := prediction_error(step)) is not None]
        peak_step = max(
            (s for s in steps if _peak(s) is not None), key=lambda s: _peak(s) or 0, default=None
        )
        versions = self.start.get("versions")
        return RunSummary(
            name=_text(self.start, "name"),
            recipe=_text(self.start, "recipe"),
            status=_text(self.end, "status") or "unfinished",
            reason=_text(self.end, "reason"),
            corpus_sha256=_text(self.start, "corpus_sha256"),
            versions=dict(versions) if isinstance(versions, Mapping) else {},
            steps=len(steps),
            batches_lost=len(self.given_up),
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else None,
            budget_bytes=_optional_count(steps[-1], "budget_bytes") if steps else None,
            peak_bytes=_peak(peak_step) if peak_step else None,
            peak_step=_optional_count(peak_step, "step") if peak_step else None,
            steps_over_budget=sum(map(_is_over_budget, steps)),
            evictions=_total(steps, "evictions"),
            evicted_bytes=_total(steps, "evicted_bytes"),
            op_retries=_total(steps, "op_retries"),
            unit_retries=_total(steps, "unit_retries"),
            step_retries=_total(steps, "step_retries"),
            replays=_total(steps, "replays"),
            switches=self.kinds.get("switch", 0),
            rollbacks=self.kinds.get("rollback", 0),
            predictions=len(errors),
            prediction_error_median=statistics.median(errors) if errors else None,
            prediction_error_max=max(errors, default=None),
            last_loss=self.last_loss,
            checkpoint=self.checkpoint,
            plans=_summarize_plans(steps),
            notices=summarize_notices(self.notices),
        )


def prediction_error(step: Event) -> float | None:
    """|predicted - measured| / measured peak of one step event.

    None where either is missing, where evictions or retries have lowered the peak, and where it was
    below the prediction but sampled: then it may have been higher in between.
    """
    predicted, measured = _optional_count(step, "predicted_peak_bytes"), _peak(step)
    corrected = any(_count(step, key) for key in ("evictions", "op_retries", "unit_retries"))
    if predicted is None or not measured or corrected:
        return None
    if step.get("peak_source", EXACT_SOURCE) != EXACT_SOURCE and measured <= predicted:
        return None
    return abs(predicted - measured) / measured


def describe_plan(plan: object) -> str:
    """A plan as a step event holds it, in words: `keep 5, recompute 3`."""
    if not isinstance(plan, Mapping):
        return str(plan)
    return ", ".join(f"{action} {units}" for action, units in plan.items() if units) or "no units"


def _summarize_plans(steps: Sequence[Event]) -> tuple[PlanSummary, ...]:
    groups: dict[tuple[str, str], list[Event]] = {}
    for step in steps:
        key = (_text(step, "policy") or "", describe_plan(step.get("plan")))
        groups.setdefault(key, []).append(step)
    return tuple(_summarize_plan(*key, steps=group) for key, group in groups.items())


def _summarize_plan(policy: str, plan: str, *, steps: Sequence[Event]) -> PlanSummary:
    lengths = [_count(step, "length") for step in steps]
    return PlanSummary(
        policy=policy,
        plan=plan,
        steps=len(steps),
        tokens=_total(steps, "tokens"),
        min_length=min(lengths),
        max_length=max(lengths),
        seconds=_seconds(steps),
        peak_bytes=max((p for s in steps if (p := _peak(s)) is not None), default=None),
    )


def _is_over_budget(step: Event) -> bool:
    peak, budget = _peak(step), _optional_count(step, "budget_bytes")
    return peak is not None and budget is not None and peak > budget


def _peak(step: Event) -> int | None:
    return _optional_count(step, "peak_bytes")


def _seconds(steps: Sequence[Event]) -> float:
    return sum(_optional_number(step, "seconds") or 0.0 for step in steps)


def _total(steps: Sequence[Event], key: str) -> int:
    return sum(_count(step, key) for step in steps)


def _count(event: Event, key: str) -> int:
    return _optional_count(event, key) or 0


def _optional_count(event: Event, key: str) -> int | None:
    value = event.get(key)
    return value if isinstance(value, int) else None


def _optional_number(event: Event, key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _text(event: Event, key: str) -> str | None:
    value = event.get(key)
    return value if isinstance(value, str) else None

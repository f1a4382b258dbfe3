"""What a session remembers of a step, as it stands in the journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rematic.memory import MemorySnapshot


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished micro-batch."""

    step: int
    """Number of the micro-batch, from 0."""

    batch: int
    """Number of sequences."""

    length: int
    """Tokens of each sequence, padding included."""

    tokens: int
    """Batch size x length."""

    padded: bool
    """Whether an attention mask hid some of them."""

    policy: str
    """Name of the policy in force."""

    pinned: bool
    """Whether only `unpin` may change the policy."""

    depth: int
    """Number of policies that can be gone back to."""

    plan: dict[str, int]
    """Number of units by action."""

    predicted_peak_bytes: int | None
    """Highest bytes in use expected; None while nothing was known."""

    peak_bytes: int | None
    """Highest bytes in use read."""

    peak_source: str
    """Where memory was read: `op ends` (exact but for workspaces), `unit ends`, or, where far more
    than was expected would have fit, the `start of backward`."""

    budget_bytes: int | None
    """Bytes that may be in use; None without a limit."""

    before: MemorySnapshot
    """Allocator statistics before the step."""

    after: MemorySnapshot
    """Allocator statistics after it."""

    seconds: float
    """Wall time from begin to end of the step."""

    evictions: int
    """Records evicted during the step."""

    evicted_bytes: int
    """Bytes they let go."""

    op_retries: int
    """Ops run again after an allocation failure."""

    unit_retries: int
    """Unit forwards run again after an allocation failure."""

    step_retries: int
    """How often the micro-batch ran again as a whole; other counts are those of its last run."""

    replays: int
    """Unit forwards run again in backward."""

    armed: bool
    """Whether the retry at the op was in force."""

    reason: str
    """The rule that decided the plan."""

    planned_by: str
    """What the plan was made from: `measurements`, or a `model` of the step."""

    predicted_seconds: float | None
    """Time expected of it; None where the plan was made from measurements."""

    keep_seconds: float | None = None
    """Time expected with everything kept; None where no model of the step knows."""

    def to_event(self) -> dict[str, Any]:
        """Returns the step as an event of the journal, in plain types."""
        before, after = dict(vars(self.before)), dict(vars(self.after))
        return {"event": "step", **vars(self), "before": before, "after": after}

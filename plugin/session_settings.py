"""What a session keeps to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rematic.batch_shape import BatchShape
from rematic.journal import SteadyJournal
from rematic.supervisor import Supervision


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session keeps to."""

    budget_bytes: int | None
    """Bytes that may be in use on the device; None without a limit."""

    reserve: float
    """Share of the budget that plans leave unused."""

    op_retry: Literal["auto", "always", "never"]
    """When a failed op is run again; `auto`: on steps that are predicted risky."""

    batch_shape: Callable[[object], BatchShape]
    """Reads the shape of a batch."""

    journal: SteadyJournal
    """Takes the decisions."""

    allow_lossy: bool = False
    """Whether a policy that loses precision may be switched to."""

    allow_tile: bool = False
    """Whether an attempt may run token-wise parts in slices, which adds up in another order."""

    attempts: int = 4
    """Tries of one micro-batch, the first included."""

    allow_split: bool = False
    """Whether a try may split the batch, which adds up in another order."""

    supervision: Supervision = field(default_factory=Supervision)
    """How policies may change without being asked."""

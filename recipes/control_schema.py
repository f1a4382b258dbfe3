"""What a recipe says of failures, changes of policy and the goals that these must meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    number_from_zero,
    one_of,
    positive_number,
    true_or_false,
    whole_number,
)

Escalation: TypeAlias = Literal["warn", "checkpoint_and_stop", "call"]


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """How failures are answered, and how fast policies may change."""

    attempts: int = 4
    """Tries of one micro-batch as a whole, the first included; default 4."""
    allow_split: bool = False
    """Whether a try may split a batch whose loss's reduction is declared; default false."""
    adapt: bool = True
    """Whether the policy may be changed without being asked; default true."""
    probation_steps: int = 8
    """Micro-batches over which a new policy is measured against the goals; default 8."""
    cool_down_steps: int = 50
    """Micro-batches before a lighter policy may come back; doubles when too short. Default 50."""
    window_steps: int = 200
    """Micro-batches over which switches are counted; default 200."""
    escalation: Escalation = "warn"
    """What a person gets when nothing is left to do: `warn` (default), `call`, a stop."""

    def __post_init__(self) -> None:
        whole_number(self, "attempts", minimum=1, remedy="write 1 for no second try")
        true_or_false(self, "allow_split")
        true_or_false(self, "adapt")
        whole_number(self, "probation_steps", minimum=2, remedy="write for example 8")
        whole_number(self, "cool_down_steps", minimum=1, remedy="write for example 50")
        whole_number(self, "window_steps", minimum=1, remedy="write for example 200")
        one_of(self, "escalation", choices=get_args(Escalation), remedy="write warn where unsure")


@dataclass(frozen=True, kw_only=True)
class GoalsConfig:
    """What a change of policy must meet within its probation, or it is taken back."""

    headroom_min: float = 0.02
    """Least share of the limit that stays free at the highest peak; default 0.02."""
    slowdown_max: float = 2.0
    """Most seconds per token, in the planner's with all kept or the last policy's; default 2.0."""
    loss_tolerance: float | None = None
    """Largest relative difference of one batch's losses; None (default): no batch runs twice."""
    gradient_tolerance: float | None = None
    """Largest distance of one batch's gradients, in norms of the lossless; None (default): none."""
    ooms_max: int = 0
    """Most failed allocations, unless the policy before had more; default 0."""
    switches_max: int = 4
    """Most switches of its own in control.window_steps; default 4."""
    throughput_min: float | None = None
    """Least tokens per second; None (default): no such goal."""

    def __post_init__(self) -> None:
        number_from_zero(self, "headroom_min", below=1, remedy="write a share such as 0.02")
        positive_number(self, "slowdown_max", remedy="write a multiple such as 1.5")
        if self.loss_tolerance is not None:
            number_from_zero(self, "loss_tolerance", remedy="write 0 for equal losses, or null")
        if self.gradient_tolerance is not None:
            number_from_zero(self, "gradient_tolerance", remedy="write for example 0.05, or null")
        whole_number(self, "ooms_max", minimum=0, remedy="write 0 for none")
        whole_number(self, "switches_max", minimum=0, remedy="write 0 for none")
        positive_number(self, "throughput_min", optional=True, remedy="write null for no such goal")

"""What a run is meant to keep to, and how fast its controller may move. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What a change of policy must meet within its probation."""

    headroom_min: float = 0.02
    """Least share of the limit that stays free at the highest peak."""

    slowdown_max: float = 2.0
    """Most seconds per token, as a multiple of those with everything kept, as the planner expects
    them at the same lengths; where it does not know, of the previous policy's."""

    loss_tolerance: float | None = None
    """Largest relative difference between the losses of one batch under both policies; None to run
    no batch twice."""

    gradient_tolerance: float | None = None
    """Largest distance between the gradients of one batch under both policies, as a multiple of the
    lossless one's norm; None to run no batch twice for it."""

    ooms_max: int = 0
    """Most allocations that may fail (and be answered) during probation."""

    switches_max: int = 4
    """Most switches that the controller makes of its own in a window; a rollback is none."""

    throughput_min: float | None = None
    """Least tokens per second; None for no such goal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Over how many steps things are judged."""

    probation_steps: int = 8
    """Steps that a new policy is measured over."""

    cool_down_steps: int = 50
    """Steps before a heavier policy may be left for the lighter one it replaced; doubles each
    time that proves to have been too early."""

    window_steps: int = 200
    """Steps over which switches are counted."""


@dataclass(frozen=True, kw_only=True)
class ControlRules:
    """Everything that a controller keeps to beside what it sees."""

    goals: Goals = Goals()
    """What changes must meet."""

    pace: Pace = Pace()
    """How fast it may move."""

    ladder: tuple[str, ...] = ()
    """Names of policies from lightest to heaviest; it switches between these only."""

    adapt: bool = True
    """Whether it may change the policy; if not, it watches and reports."""

    can_release: bool = True
    """Whether the allocator has cached blocks that can be given back."""

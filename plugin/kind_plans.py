"""The plans for one kind of steps: its profile, a plan per bucket of lengths, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from rematic import control
from rematic.batch_shape import BatchShape
from rematic.control import ForecastErrors
from rematic.cost.live_profile import NotTraceableError
from rematic.cost.profile import StepProfile
from rematic.planner import (
    Pace,
    Problem,
    Proposal,
    StepCosts,
    kept_seconds,
    length_of_bucket,
    problem_of,
    propose,
    rise_of,
)
from rematic.policy import Action, Plan

REUSE_SHARE = 1.02
"""A plan is asked for again where there is so much more room than it was made for."""

COMPARED_SHARE = 0.5
"""Samples are compared with the model if they are at least so long, beside what is planned."""

AGREEING_SHARE = 0.02
"""A step that rose so nearly as far as predicted is the last one that is watched."""

MAX_WATCHED = 3
"""Most steps that the model has planned and that are watched."""

UNARMED_SHARE = 0.02
"""Share of the rise by which steps that are not armed stay below what armed ones reached, twice as
much after each of them that ran out of memory."""

MIN_PROOFS = 2
"""So many armed steps must go well before steps that come as near the budget are not armed."""

Key: TypeAlias = tuple[int, tuple[Action | None, ...]]
"""Longest length of a bucket, and what rules give to each unit."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An undisturbed step whose memory was read after every op."""

    shape: BatchShape
    """Its batch."""

    plan: Plan
    """What it started with."""

    rise_bytes: int
    """How far it rose above what was in use before it."""

    autocast: torch.dtype | None
    """What its units computed in; None without autocast."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A plan, and what it was made from."""

    costs: StepCosts
    problem: Problem
    proposal: Proposal
    room_bytes: int

    def holds(self, room_bytes: int) -> bool:
        """Returns whether the plan is still the one to take with so much room."""
        if not self.proposal.fits or self.proposal.peak_bytes > room_bytes:
            return False
        return room_bytes <= REUSE_SHARE * self.room_bytes or self.proposal.extra_seconds == 0


@dataclass(kw_only=True)
class KindPlans:
    """What is known of one kind of steps."""

    num_samples: int = 0
    """Steps that were watched for a sample."""

    sample: Sample | None = None
    """What the model is compared with before it plans."""

    profile: StepProfile | None = None
    """What its steps cost."""

    is_refused: bool = False
    """Whether it is planned from measurements for good."""

    num_watched: int = 0
    """Steps that the model planned and that were watched."""

    num_proofs: int = 0
    """Armed steps that the model planned and that went without a failure, one after another."""

    highest_bytes: int = 0
    """The highest peak among them."""

    most_hole_bytes: int = 0
    """The most that the allocator held in pieces before one of them."""

    num_losses: int = 0
    """Steps that were not armed and ran out of memory."""

    errors: ForecastErrors = field(default_factory=ForecastErrors)
    """How far predictions were off."""

    _pace: Pace | None = None
    _plans: dict[Key, _Made] = field(default_factory=dict)
    _keep_seconds: dict[int, float] = field(default_factory=dict)
    """On paper, by the longest length of a bucket."""

    @property
    def is_watched(self) -> bool:
        """Whether the next step is: until the model tells one, but not for ever."""
        if self.num_watched == 0:
            return True
        agrees = any(abs(share) <= AGREEING_SHARE for share in self.errors.shares)
        return self.num_watched < MAX_WATCHED and not agrees

    def proven_bytes(self, hole_bytes: int | None) -> int | None:
        """Returns the bytes in use that steps have had without running out.

        Args:
            hole_bytes: What the allocator holds in pieces, where hardly anything large fits; None
                if it cannot tell.

        Returns:
            Bytes; None while too few steps have shown it, or none with memory as broken up.
        """
        is_known = self.num_proofs >= MIN_PROOFS and (hole_bytes or 0) <= self.most_hole_bytes
        return self.highest_bytes if is_known else None

    def prove(self, peak_bytes: int, *, hole_bytes: int | None, failed: bool) -> None:
        """Takes note of whether an armed step ran out of memory.

        Args:
            peak_bytes: The highest bytes in use that were read.
            hole_bytes: What the allocator held in pieces before it; None if it cannot tell.
            failed: Whether an allocation failed: then everything is to be proven anew.
        """
        self.num_proofs = 0 if failed else self.num_proofs + 1
        self.highest_bytes = 0 if failed else max(self.highest_bytes, peak_bytes)
        self.most_hole_bytes = 0 if failed else max(self.most_hole_bytes, hole_bytes or 0)

    def note_loss(self) -> None:
        """Takes note that a step that was not armed ran out of memory."""
        self.num_losses += 1
        self.prove(0, hole_bytes=0, failed=True)

    @property
    def unarmed_share(self) -> float:
        """Share of the rise by which unarmed steps stay below what armed ones reached."""
        return UNARMED_SHARE * (1 << self.num_losses)

    def take(self, profile: StepProfile, pace: Pace, *, length: int) -> None:
        """Takes up a profile if it tells what the sample rose by.

        A sample much shorter than the step in question is not asked: what it rose by is mostly
        something else, and the first steps that are planned tell.

        Args:
            profile: What steps of the kind cost.
            pace: How fast the device is.
            length: Tokens of the sequences that are to be planned.

        Raises:
            NotTraceableError: If it is not near.
        """
        assert self.sample is not None
        shape, rise_bytes = self.sample.shape, self.sample.rise_bytes
        if shape.length < COMPARED_SHARE * length:
            self.profile, self._pace = profile, pace
            return
        costs = profile.costs_at(batch=shape.batch, length=shape.length, padded=shape.padded)
        predicted = rise_of(problem_of(costs, pace, given=self.sample.plan.actions))
        self.errors = self.errors.with_peak(
            predicted_bytes=predicted, read_bytes=rise_bytes, exact=True
        )
        if not self.errors.is_trusted:
            raise NotTraceableError(
                f"a step rose by {rise_bytes:,} bytes where {predicted:,} were predicted, so its "
                "loss, or what it computes beside the model, is not what was traced"
            )
        self.profile, self._pace = profile, pace

    def refuse(self) -> None:
        """Leaves the kind to measurements for good."""
        self.is_refused = True
        self.profile = None
        self._plans.clear()
        self._keep_seconds.clear()

    def propose(
        self,
        shape: BatchShape,
        given: tuple[Action | None, ...],
        *,
        room_bytes: int,
        allowed: Sequence[str],
    ) -> Proposal:
        """Returns the plan for one shape: the one that was made, as long as it is the best.

        Args:
            shape: The batch.
            given: For each unit what the plan must not change.
            room_bytes: Bytes by which the step may rise.
            allowed: Names of the actions that may be chosen.

        Raises:
            ValueError: If the shape, or a given action, was not traced.
        """
        assert self.profile is not None
        key = (length_of_bucket(shape.length), given)
        made = self._plans.get(key)
        if made is not None and made.holds(room_bytes):
            return made.proposal
        pace = self._scaled_pace()
        if made is None:
            costs = self.profile.costs_at(batch=shape.batch, length=key[0], padded=shape.padded)
            problem = problem_of(costs, pace, allowed=allowed, given=given)
        else:
            costs, problem = made.costs, made.problem
        proposal = propose(costs, problem, pace, room_bytes=room_bytes)
        self._plans[key] = _Made(
            costs=costs, problem=problem, proposal=proposal, room_bytes=room_bytes
        )
        return proposal

    def keep_seconds(self, shape: BatchShape) -> float | None:
        """Returns the time of a step with everything kept, by the speed of the steps so far.

        None while there is no model, or too few of its steps were timed.

        Args:
            shape: The batch.
        """
        speed = self.errors.measured_speed
        if self.profile is None or self._pace is None or speed is None:
            return None
        length = length_of_bucket(shape.length)
        if length not in self._keep_seconds:
            try:
                costs = self.profile.costs_at(batch=shape.batch, length=length, padded=shape.padded)
            except ValueError:  # a shape that was not traced
                return None
            self._keep_seconds[length] = kept_seconds(costs, self._pace)
        return speed * self._keep_seconds[length] * shape.length / length

    def learn_peak(self, proposal: Proposal, *, key: Key, rise_bytes: int, exact: bool) -> None:
        """Takes note of how far a planned step rose; its plan is made again if that was far off.

        Args:
            proposal: Its plan.
            key: Where that plan is kept.
            rise_bytes: How far it was seen to rise, or would have without evictions.
            exact: Whether memory was read after every op, and nothing was evicted.
        """
        predicted = proposal.peak_bytes
        self.errors = self.errors.with_peak(
            predicted_bytes=predicted, read_bytes=rise_bytes, exact=exact
        )
        share = control.error_share(predicted_bytes=predicted, read_bytes=rise_bytes)
        if share > control.REPLANNED_SHARE or (exact and -share > control.REPLANNED_SHARE):
            self._plans.pop(key, None)

    def learn_seconds(self, proposal: Proposal, seconds: float) -> None:
        """Takes note of how long a planned step took; if that changes the speed, of all plans.

        Args:
            proposal: Its plan.
            seconds: Seconds from its begin to its end.
        """
        before = self.errors.speed
        self.errors = self.errors.with_seconds(predicted=proposal.seconds, measured=seconds)
        if self.errors.speed != before:
            self._plans.clear()

    def _scaled_pace(self) -> Pace:
        pace, speed = self._pace, self.errors.speed
        assert pace is not None
        return replace(pace, op_seconds=lambda op: speed * pace.op_seconds(op))

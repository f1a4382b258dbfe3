"""Lets `planned` choose by a model of the step: traces it, asks the planner, learns its errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from rematic import control
from rematic.activations import Engine, Notice
from rematic.batch_shape import BatchShape
from rematic.byte_sizes import format_bytes
from rematic.control import StepDecision, StepOutcome, StepRequest
from rematic.cost.devices import Device
from rematic.cost.live_profile import (
    NotTraceableError,
    StepKind,
    batch_inputs,
    live_device,
    trace_live,
    transformers_model,
)
from rematic.cost.profile import StepProfile
from rematic.cost.roofline import pace_of
from rematic.kind_plans import KindPlans, Sample
from rematic.planner import Proposal, length_of_bucket
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload
from rematic.step_record import StepRecord
from rematic.transaction import num_ranks

_log = logging.getLogger("rematic")

MAX_KINDS = 6
"""Kinds of steps that are traced in one session; others are planned from measurements."""

TRACE_BYTES = 8 * 2**20
"""Host memory that a trace may take for good. (Llama, 2 to 12 layers: 2 MiB for the stack of its
thread, which glibc keeps, and 2 MiB for objects of Python.)"""

MAX_SAMPLES = 4
"""Steps that are watched for the sake of one kind until one of them was undisturbed."""


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A step that is to be planned."""

    decision: StepDecision
    """What was decided from measurements; what the step starts with, once that is decided."""

    request: StepRequest
    shape: BatchShape
    kind: StepKind
    given: tuple[Action | None, ...]
    proposal: Proposal | None = None
    """The model's plan, if it was taken."""


class ModelPlanner:
    """Refines what was decided from measurements, where a model of the step is at hand.

    Nothing is traced before memory has been short: as long as every unit may stay, there is
    nothing to choose.

    Args:
        model: The model.
        engine: Its units.
        patterns: Patterns that name the units.
        may_move: Whether tensors may move to a place that the recipe names.
        notify: Takes what is found out.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        *,
        patterns: tuple[str, ...],
        may_move: bool,
        notify: Callable[[Notice], None],
    ) -> None:
        self._model = model
        self._engine = engine
        self._patterns = patterns
        self._moving: tuple[Action, ...] = (RecomputeOffload(), Offload()) if may_move else ()
        self._notify = notify
        self._kinds: dict[StepKind, KindPlans] = {}
        self._device: Device | None = None
        self._open: _Question | None = None
        self._is_off = False
        self._has_told_of_room = False

    @property
    def kinds(self) -> Mapping[StepKind, KindPlans]:
        """What was learned of kinds of steps."""
        return self._kinds

    def take_up(self, kinds: Mapping[StepKind, KindPlans]) -> None:
        """Goes on from what was learned before."""
        self._kinds = dict(kinds)

    def refine(
        self,
        decision: StepDecision,
        request: StepRequest,
        shape: BatchShape,
        batch: object,
        *,
        host_capacity_bytes: int | None = None,
    ) -> StepDecision:
        """Returns the decision with the model's plan, or watched, or as it is.

        Nothing is traced where that could take the memory which the step itself needs.

        Args:
            decision: What was decided from measurements.
            request: What it was decided for.
            shape: Shape of the batch.
            batch: The batch, read for what it holds.
            host_capacity_bytes: Bytes that could be in use if the host's memory is planned and they
                are known, else None.
        """
        self._open = None
        if self._is_off:
            return decision
        if not control.is_pressed(decision, request):
            if decision.watched:
                self._open = self._sampled(decision, request, shape, batch)
            return self._with_keep_seconds(decision, shape, batch, request)
        kind = self._kind_of(shape, batch, request)
        if kind is None:
            return decision
        question = self._question(decision, request, shape, kind)
        plans = self._kinds.setdefault(kind, KindPlans())
        if self._may_answer(decision, plans, host_capacity_bytes):
            question = self._answered(question, plans)
        self._open = question
        decision = _timed(self._open.decision, plans, shape)
        self._open = replace(self._open, decision=decision)
        return decision

    def _may_answer(
        self, decision: StepDecision, plans: KindPlans, host_capacity_bytes: int | None
    ) -> bool:
        if plans.profile is not None or control.has_room_for_trace(
            decision, trace_bytes=TRACE_BYTES, capacity_bytes=host_capacity_bytes
        ):
            return True
        if not plans.is_refused and not self._has_told_of_room:
            self._has_told_of_room = True
            self._tell(f"a trace may take {format_bytes(TRACE_BYTES)}, which the step needs itself")
        return False

    def _question(
        self, decision: StepDecision, request: StepRequest, shape: BatchShape, kind: StepKind
    ) -> _Question:
        pinned = [unit.pinned is not None for unit in self._engine.units]
        given = control.given_actions(request, pinned)
        return _Question(decision=decision, request=request, shape=shape, kind=kind, given=given)

    def _sampled(
        self, decision: StepDecision, request: StepRequest, shape: BatchShape, batch: object
    ) -> _Question | None:
        """Makes a step that is watched anyway the sample of its kind, if that can be traced."""
        try:
            kind = self._read_kind(shape, batch, request)
        except NotTraceableError:  # said when memory is short, and perhaps never
            return None
        plans = self._kinds.setdefault(kind, KindPlans())
        if plans.profile is not None or plans.is_refused:
            return None
        return self._question(decision, request, shape, kind)

    def _with_keep_seconds(
        self, decision: StepDecision, shape: BatchShape, batch: object, request: StepRequest
    ) -> StepDecision:
        """Adds what a model that is known already says of the step with everything kept."""
        if not self._kinds:
            return decision
        kind = self._kind_of(shape, batch, request)
        plans = None if kind is None else self._kinds.get(kind)
        return decision if plans is None else _timed(decision, plans, shape)

    def note_loss(self, decision: StepDecision) -> None:
        """Takes note that memory ran out in a step that was begun so and was not armed.

        Args:
            decision: What it started with.
        """
        asked = self._open
        if asked is not None and asked.decision is decision and asked.proposal is not None:
            self._kinds[asked.kind].note_loss()

    def learn(
        self,
        decision: StepDecision,
        record: StepRecord,
        outcome: StepOutcome,
        *,
        autocast: torch.dtype | None,
    ) -> None:
        """Takes note of how a step went.

        Args:
            decision: What it started with.
            record: How it went.
            outcome: What was learned from it.
            autocast: What its units computed in; None without autocast, or if unwatched.
        """
        asked, self._open = self._open, None
        before, peak = record.before.allocated_bytes, record.peak_bytes
        if asked is None or asked.decision is not decision or before is None or peak is None:
            return  # (another decision: the step was tried again under a heavier plan)
        plans = self._kinds[asked.kind]
        undisturbed = not (record.evictions or record.op_retries or record.unit_retries)
        watched = record.peak_source == control.EXACT_SOURCE
        if asked.proposal is not None:
            plans.num_watched += watched
            if record.armed:
                plans.prove(
                    peak,
                    hole_bytes=record.before.inactive_split_bytes,
                    failed=record.op_retries + record.unit_retries > 0,
                )
            if outcome.missing_bytes:  # it would have passed the limit by so much
                peak = max(peak, (decision.limit_bytes or 0) + outcome.missing_bytes)
            plans.learn_peak(
                asked.proposal,
                key=(length_of_bucket(asked.shape.length), asked.given),
                rise_bytes=peak - before,
                exact=watched and undisturbed,
            )
            if undisturbed and not watched:
                plans.learn_seconds(asked.proposal, record.seconds)
            if not plans.errors.is_trusted:
                self._refuse(plans, f"predictions are off by {plans.errors.shares[-1]:+.0%}")
        elif watched and undisturbed:
            plans.sample = Sample(
                shape=asked.shape,
                plan=decision.plan,
                rise_bytes=peak - before,
                autocast=autocast,
            )

    def _kind_of(self, shape: BatchShape, batch: object, request: StepRequest) -> StepKind | None:
        try:
            return self._read_kind(shape, batch, request)
        except NotTraceableError as error:
            self._is_off = True
            self._tell(str(error))
            return None

    def _read_kind(self, shape: BatchShape, batch: object, request: StepRequest) -> StepKind:
        self._refuse_what_no_trace_shows()
        inputs = batch_inputs(batch)
        if not self._kinds:  # asked once, and before a step is watched for the sake of it
            transformers_model(self._model)
        return StepKind(
            batch=shape.batch,
            padded=shape.padded,
            accumulates=request.pending_gradient_bytes == 0,
            inputs=inputs,
        )

    def _refuse_what_no_trace_shows(self) -> None:
        if num_ranks() > 1:
            raise NotTraceableError("several ranks train together")
        for unit in self._engine.units:
            if unit.graphless:
                raise NotTraceableError(f"the unit {unit.name} has tensors that it does not save")
            if unit.is_compiled:
                raise NotTraceableError(f"the unit {unit.name} is compiled")

    def _answered(self, question: _Question, plans: KindPlans) -> _Question:
        num_traced = sum(known.profile is not None for known in self._kinds.values())
        if plans.profile is None and num_traced >= MAX_KINDS and not plans.is_refused:
            self._refuse(plans, f"{MAX_KINDS} kinds of batches were traced, and here is another")
        if plans.sample is None and not plans.is_refused:
            return self._watched(question, plans)
        if plans.profile is None and not plans.is_refused:
            self._make_profile(question, plans)
        return question if plans.is_refused else self._planned(question, plans)

    def _watched(self, question: _Question, plans: KindPlans) -> _Question:
        """Lets the peak of a step be read exactly, for the model to be compared with it."""
        if plans.num_samples >= MAX_SAMPLES:
            self._refuse(plans, f"none of {MAX_SAMPLES} steps went without an eviction")
            return question
        plans.num_samples += 1
        return replace(question, decision=replace(question.decision, watched=True, roomy=False))

    def _make_profile(self, question: _Question, plans: KindPlans) -> None:
        started = time.perf_counter()
        assert plans.sample is not None
        try:
            self._device = self._device or live_device(self._model)
            profile = trace_live(
                self._model,
                replace(question.kind, autocast=plans.sample.autocast),
                actions=self._actions(question),
                patterns=self._patterns,
            )
            _check_units(profile, self._engine)
            plans.take(profile, pace_of(self._device), length=question.shape.length)
        except Exception as error:  # whatever it was, measurements will do
            self._refuse(plans, _said_by(error))
            return
        _log.info(
            "memory is short: steps of %d sequences were traced in %.1f s, and are planned by that",
            question.kind.batch,
            time.perf_counter() - started,
        )

    def _actions(self, question: _Question) -> tuple[Action, ...]:
        """Returns the actions to trace: those that may be chosen, and those that rules give."""
        ruled = [action for action in question.given if isinstance(action, _MOVING)]
        return tuple(dict.fromkeys((Keep(), Recompute(), *self._moving, *ruled)))

    def _planned(self, question: _Question, plans: KindPlans) -> _Question:
        decision, request = question.decision, question.request
        reserve = plans.errors.reserve_share
        room = int(control.room_bytes(decision, request) / (1 + reserve))
        proven_bytes = plans.proven_bytes(request.hole_bytes) if request.repeatable else None
        if proven_bytes is not None:  # less than that, and not armed
            assert request.in_use_bytes is not None
            proven_room = (proven_bytes - request.in_use_bytes) / (1 + plans.unarmed_share)
            room = min(room, int(proven_room))
        try:
            proposal = plans.propose(
                question.shape,
                question.given,
                room_bytes=room,
                allowed=("keep", "selective", "recompute", *(a.name for a in self._moving)),
            )
        except ValueError as error:  # an action of a rule that was not traced, or a shape
            self._refuse(plans, _said_by(error))
            return question
        if not proposal.fits:
            return question
        adopted = control.adopt(
            decision,
            request,
            proposal,
            reserve_share=reserve,
            watched=plans.is_watched,
            proven_bytes=proven_bytes,
        )
        return replace(question, decision=adopted, proposal=proposal)

    def _refuse(self, plans: KindPlans, why: str) -> None:
        plans.refuse()
        self._tell(why)

    def _tell(self, why: str) -> None:
        text = f"plans come from measurements alone: {why.rstrip('.')}"
        _log.info("%s.", text)
        self._notify(Notice(unit="", kind="planner", text=text))


_MOVING = (RecomputeOffload, Offload)


def _timed(decision: StepDecision, plans: KindPlans, shape: BatchShape) -> StepDecision:
    seconds = plans.keep_seconds(shape)
    return decision if seconds is None else replace(decision, keep_seconds=seconds)


def _check_units(profile: StepProfile, engine: Engine) -> None:
    names = [unit.name for unit in engine.units]
    pairs = zip(names, profile.unit_names, strict=False)
    if len(names) != len(profile.unit_names) or not all(a.endswith(b) for a, b in pairs):
        raise NotTraceableError("the model of transformers does not hold all units")


def _said_by(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, NotTraceableError) else f"{type(error).__name__}: {first}"

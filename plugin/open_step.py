"""One step while it runs: its plan in force, its meter, its retry of failing ops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rematic.activations import Engine, Eviction, OpRetry, PartsMode, StepMeter
from rematic.activations.record import Record
from rematic.batch_shape import BatchShape
from rematic.control import EXACT_SOURCE, History, StepDecision, StepOutcome, kept_key
from rematic.memory import LastTries, MemorySnapshot, Probe, is_out_of_memory
from rematic.policy import Keep, Selective
from rematic.step_record import StepRecord

_LAST_TRIES = 2
"""Ops of one step that are tried again although no record gave way."""
BEYOND_SHARE = 0.02
"""So much of the limit is tried beyond what the rest of a step that is not armed takes, since small
blocks do not fit into every hole. (With 3 % of the rest one document of 78 was lost.)"""
SURPRISING_SHARE = 1.1
"""A step that uses more than this share of what was predicted for it is a surprise."""

Write = Callable[[Mapping[str, Any]], None]


class OpenStep:
    """Applies the plan of one step and answers what happens until it is closed."""

    def __init__(
        self,
        engine: Engine,
        probe: Probe,
        decision: StepDecision,
        *,
        before: MemorySnapshot,
        number: int,
        shape: BatchShape,
        armed: bool,
        spare: bool,
        agreed: Sequence[bool],
        gradient_bytes: Callable[[], int],
        write: Write,
        parts: PartsMode = "whole",
    ) -> None:
        self.number = number
        self.shape = shape
        self.decision = decision
        self.num_op_retries = 0
        self.num_step_retries = 0
        """How often the micro-batch ran out of memory and was opened again."""
        self.autocast: torch.dtype | None = None
        """What units were seen to compute in under autocast, if the step is watched."""
        self._engine = engine
        self._probe = probe
        self._write = write
        self._started = time.perf_counter()
        self._before = before
        self._counts = _Counts(engine)
        self._missing_bytes = 0
        self._last_tries = LastTries(_LAST_TRIES)
        watched = decision.watched
        self.meter = StepMeter(
            probe.allocated_bytes,
            engine.ledger,
            before_bytes=before.allocated_bytes,
            gradient_bytes=gradient_bytes,
            watched=watched,
        )
        engine.apply(decision.plan, unmeasured=decision.unmeasured, agreed=agreed)
        engine.slice_parts(parts)
        engine.ledger.after_forward = None if decision.roomy else self._at_unit_end
        engine.ledger.at_backward = (
            self._at_first_backward if decision.roomy else self.meter.at_backward
        )
        engine.ledger.after_leaving = self.meter.after_eviction if watched else None
        engine.ledger.at_unit_retry = self._note_unit_retry
        after_op = self.meter.read if watched else None
        self.armed = armed
        """Whether the retry at the op is in force."""
        self._spare = spare
        self._mode: OpRetry | None = None
        if armed or watched:
            self._enter_mode(after_op)

    def arm(self) -> None:
        """Puts the retry at the op in force."""
        self.armed = True
        if self._mode is None:
            self._enter_mode(None)

    def close(self) -> None:
        """Stops watching; the plan stays in force until the next step."""
        self._engine.ledger.after_forward = None
        self._engine.ledger.after_leaving = None
        self._engine.ledger.at_backward = None
        self._engine.ledger.at_unit_retry = None
        self._engine.stand_aside(False)
        self._engine.slice_parts("whole")
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch 2.13
            self._mode = None

    def let_units_stand_aside(self) -> None:
        """Runs units that are kept as they are, in a step with room to spare that can be repeated.

        Where memory runs out all the same, the whole step runs again, under records.
        """
        if self._spare and not self.armed:
            self._engine.stand_aside(True)

    def relieve(self, num_bytes: int, where: str) -> int:
        """Answers an op that ran out of memory.

        Returns:
            The bytes freed, 1 for a try without any; 0 lets the failure stand.
        """
        if not self.armed:  # memory is read after every op, and that is all
            return 0
        eviction = self._engine.ledger.evict(num_bytes, spare_active=True)
        self.meter.after_eviction()
        if not eviction.bytes_freed and not self._last_tries.take():
            return 0
        self._missing_bytes += min(num_bytes, eviction.bytes_freed)
        self.num_op_retries += 1
        self._note_retry("op", where, num_bytes, eviction)
        return eviction.bytes_freed or 1

    def outcome(self) -> StepOutcome:
        """Returns what the controller learns from the step."""
        classes = self._engine.classes
        return StepOutcome(
            tokens=self.shape.tokens,
            length=self.shape.length,
            kept_bytes=tuple(
                (kept_key(classes[name], action_name), num_bytes)
                for (name, action_name), num_bytes in _ascending(self.meter.kept)
                # what a unit keeps of ops that the model chose says nothing of other choices
                if action_name == Keep.name or self.decision.planned_by != "model"
            ),
            unit_transient_bytes=self.meter.transient_bytes("unit"),
            head_transient_bytes=self.meter.transient_bytes("head"),
            backward_transient_bytes=self.meter.transient_bytes("backward"),
            # the plan of a watched step was a guess, and what it needs has now been measured
            missing_bytes=0 if self._was_guessed() else self._missing_bytes,
            surprising=self._is_surprising(),
        )

    def record(self, history: History, *, budget_bytes: int | None) -> StepRecord:
        """Returns the step as the journal holds it."""
        counts = self._counts.since()
        return StepRecord(
            step=self.number,
            batch=self.shape.batch,
            length=self.shape.length,
            tokens=self.shape.tokens,
            padded=self.shape.padded,
            policy=history.current.name,
            pinned=history.pinned,
            depth=len(history.entries) - 1,
            plan=self.decision.plan.counts(),
            predicted_peak_bytes=self.decision.predicted_peak_bytes,
            peak_bytes=self.meter.peak_bytes,
            peak_source=self._peak_source(),
            budget_bytes=budget_bytes,
            before=self._before,
            after=self._probe.snapshot(),
            seconds=time.perf_counter() - self._started,
            evictions=counts["evictions"],
            evicted_bytes=counts["evicted_bytes"],
            op_retries=self.num_op_retries,
            unit_retries=counts["unit_retries"],
            step_retries=self.num_step_retries,
            replays=counts["replays"],
            armed=self.armed,
            reason=self.decision.reason,
            planned_by=self.decision.planned_by,
            predicted_seconds=self.decision.predicted_seconds,
            keep_seconds=self.decision.keep_seconds,
        )

    def _enter_mode(self, after_op: Callable[[], object] | None) -> None:
        self._mode = OpRetry(self.relieve, after_op=after_op)
        self._mode.__enter__()  # type: ignore[no-untyped-call] # torch 2.13

    def _was_guessed(self) -> bool:
        return self.decision.watched and self.decision.planned_by != "model"

    def _is_surprising(self) -> bool:
        predicted, read = self.decision.predicted_peak_bytes, self.meter.peak_bytes
        return predicted is not None and read is not None and read > SURPRISING_SHARE * predicted

    def _peak_source(self) -> str:
        if self.decision.watched:
            return EXACT_SOURCE
        return "start of backward" if self.decision.roomy else "unit ends"

    def _at_first_backward(self, record: Record) -> None:
        self.meter.at_backward(record)
        self._engine.ledger.at_backward = None

    def _at_unit_end(self, record: Record) -> None:
        action = self.decision.plan.actions[record.position]
        if self.decision.watched:
            self.autocast = _autocast_dtype()
        in_use = self.meter.at_unit_end(record, selective=isinstance(action, Selective))
        limit = self.decision.limit_bytes
        if in_use is None or limit is None:
            return
        leaving = record.leaving_bytes()
        in_use -= leaving
        if self.decision.rise_after_bytes is not None:
            rise = self.decision.rise_after_bytes[record.position]
            self._evict_excess(in_use + rise - limit)
            if not self.armed and record.position == len(self._engine.units) - 1:
                self._try_room(rise - leaving)
            return
        # What the step needs is beside what was there before and what records hold: inputs of units
        # and the like are in it already, and would count twice on top of the bytes in use.
        held = self.meter.staying_bytes - self._counts.since()["evicted_bytes"]
        needed = self.decision.needed_after_bytes[record.position]
        self._evict_excess(max(in_use, (self.meter.before_bytes or 0) + held + needed) - limit)

    def _try_room(self, rise: int) -> None:
        """Evicts until what the rest of the step takes, and some more, can be had in one piece.

        Backward begins next, where nothing answers a failure unless the step is armed. On a host
        the try is a mapping that nobody touches; a GPU's allocator would keep the block.
        """
        if self._probe.kind != "host":
            return
        beyond = int(BEYOND_SHARE * (self.decision.limit_bytes or 0))
        while not _can_allocate(max(0, rise + beyond)):
            eviction = self._engine.ledger.evict(1)
            if not eviction.bytes_freed:
                return
            self._note_eviction(beyond, eviction)

    def _evict_excess(self, excess: int) -> None:
        if excess <= 0:
            return
        eviction = self._engine.ledger.evict(excess)
        if eviction.bytes_freed:
            self._note_eviction(excess, eviction)

    def _note_unit_retry(self, unit: str, num_bytes: int, eviction: Eviction) -> None:
        self.meter.after_eviction()
        self._missing_bytes += min(num_bytes, eviction.bytes_freed)
        self._note_retry("unit", unit, num_bytes, eviction)

    def _note_retry(self, level: str, where: str, num_bytes: int, eviction: Eviction) -> None:
        self._write(
            {
                "event": "retry",
                "step": self.number,
                "level": level,
                "where": where,
                "bytes_asked": num_bytes,
                "bytes_freed": eviction.bytes_freed,
                "units": list(eviction.units),
            }
        )

    def _note_eviction(self, excess: int, eviction: Eviction) -> None:
        self._missing_bytes += min(excess, eviction.bytes_freed)
        self.meter.after_eviction()
        self._write(
            {
                "event": "evict",
                "step": self.number,
                "bytes_asked": excess,
                "bytes_freed": eviction.bytes_freed,
                "units": list(eviction.units),
                "reason": "what is held and what the rest of the step needs pass the limit",
            }
        )


def _can_allocate(num_bytes: int) -> bool:
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _autocast_dtype() -> torch.dtype | None:
    kinds = ("cuda", "cpu")
    return next((torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)), None)


class _Counts:
    """Counters of the engine at the start of a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._start = self._now()

    def since(self) -> dict[str, int]:
        now = self._now()
        return {name: now[name] - self._start[name] for name in now}

    def _now(self) -> dict[str, int]:
        counts = self._engine.ledger.counts
        return {
            "evictions": counts.num_evictions,
            "evicted_bytes": counts.evicted_bytes,
            "replays": counts.replays.total(),
            "unit_retries": sum(unit.num_retries for unit in self._engine.units),
        }


def _ascending(kept: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    # the last measurement of a class counts, and that shall be the largest
    return sorted(kept.items(), key=lambda item: item[1])

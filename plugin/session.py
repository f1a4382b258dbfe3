"""The one facade: every integration drives a Session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rematic import control
from rematic.activations import Engine, Notice, OpRetry
from rematic.batch_shape import BatchShape
from rematic.control import Costs, History, HistoryEntry, StepDecision, StepRequest, StopReport
from rematic.journal import EventSink
from rematic.memory import MemorySnapshot, Probe, is_out_of_memory
from rematic.open_step import OpenStep
from rematic.optimizer_boundary import OptimizerBoundary, OptimizerGuard
from rematic.optimizer_relief import OptimizerRelief
from rematic.policy import (
    LADDER,
    Plan,
    Policy,
    Recompute,
    policy_named,
    policy_to_plain,
    resolve,
)
from rematic.session_report import format_session_report
from rematic.session_step import SessionStep
from rematic.split_batch import Reduction
from rematic.step_record import StepRecord
from rematic.step_recovery import StepRecovery, begin_recovery, with_room
from rematic.supervisor import Supervision, Supervisor
from rematic.training_tensors import gradient_bytes, pending_gradient_bytes
from rematic.transaction import ChangingState
from rematic.untrained_parameters import tell_of_untrained

B = TypeVar("B")
T = TypeVar("T")
STATE_VERSION = 1
"""Version of what `state_dict` returns."""


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

    journal: EventSink
    """Takes the decisions."""

    allow_lossy: bool = False
    """Whether a policy that loses precision may be switched to."""

    attempts: int = 4
    """Tries of one micro-batch, the first included."""

    allow_split: bool = False
    """Whether a try may split the batch, which adds up in another order."""

    supervision: Supervision = field(default_factory=Supervision)
    """How policies may change without being asked."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change of policy that was asked for and waits for a boundary."""

    event: str
    """Its kind in the journal."""

    reason: str
    """Why."""

    make: Callable[[History, int], History]
    """Returns the history after it, given the one before it and the number of the micro-batch."""


class Session:
    """Plans each step, watches it, learns from it, and can always go back.

    Made by `rematic.attach`, undone by `detach`.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        probe: Probe,
        *,
        optimizers: tuple[torch.optim.Optimizer, ...],
        policy: Policy,
        settings: SessionSettings,
    ) -> None:
        self.model = model
        self.probe = probe
        self.settings = settings
        self.num_steps = 0
        """Micro-batches finished."""
        self.last_step: StepRecord | None = None
        """The micro-batch finished last."""
        self.at_detach: list[Callable[[], None]] = []
        """Called when the session is detached, the last one first."""
        self._engine = engine
        self._parameters = list(model.parameters())
        self._costs = Costs()
        self._changing = ChangingState()
        self._num_updates = 0
        self.at_stop: Callable[[StopReport], str | None] | None = None
        """Called when a micro-batch is given up, before the error; saves a checkpoint and returns
        where it is."""
        self._step: OpenStep | None = None
        self._asked: StepRequest | None = None
        self._pending: list[_Change] = []
        self._at_boundary = True
        self._actions = resolve(policy, engine.classes)
        entry = HistoryEntry(policy=policy, step=0, reason="the first policy")
        self._history = History(entries=(entry,))
        self._plan = Plan(actions=tuple(action or Recompute() for action in self._actions))
        engine.apply(self._plan)
        self._boundaries: list[OptimizerBoundary] = []
        self.supervisor = Supervisor(self, settings.supervision)
        """Lets the controller see every step."""
        engine.ledger.at_notice = self.write_notice
        self._write_attach()
        engine.tell_beginning()
        self.add_optimizers(*optimizers)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._history.current

    @property
    def plan(self) -> Plan:
        """The plan of the step that runs, or of the last one."""
        return self._plan

    @property
    def history(self) -> History:
        """The policies so far, the one in force last."""
        return self._history

    @property
    def costs(self) -> Costs:
        """What steps need, as learned so far."""
        return self._costs

    @property
    def unit_classes(self) -> Mapping[str, str]:
        """Class of each unit by its name, in order."""
        return self._engine.classes

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that may be in use on the device; None without a limit."""
        return self.settings.budget_bytes

    def add_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Covers optimizers made after attaching: a boundary lies after the step of each."""
        self._boundaries += [
            OptimizerBoundary(
                optimizer,
                guard=self._optimizer_guard,
                on_step=self._pass_boundary,
                on_torn=SessionStep(self).torn,
            )
            for optimizer in optimizers
        ]

    def read_parameters(self) -> None:
        """Looks for the parameters again, after something has replaced them (a sharded wrapper)."""
        self._parameters = list(self.model.parameters())

    @contextlib.contextmanager
    def step(self, batch: object = None) -> Iterator[None]:
        """Covers forward and backward of one micro-batch: plans for it, watches it, learns.

        Args:
            batch: The micro-batch, read for its shape only. Without one every step is planned as
                if it were as long as the last, and armed for the retry at the op.
        """
        self.begin_step(batch)
        try:
            yield
        except BaseException as error:
            self.abort_step(error)
            raise
        self.end_step()

    def run(self, fn: Callable[[B], T], batch: B, *, reduction: Reduction | None = None) -> T:
        """Runs `fn(batch)`, which does forward and backward and returns the loss, as one step.

        An allocation that fails is answered at the op, on every step and not on risky ones alone
        (unless the recipe's `op_retry` is `never`), then at the unit. If that does not help,
        everything is put back and `fn(batch)` runs again under a heavier plan, `control.attempts`
        times at most. It must end before gradients are clipped and the optimizer steps.

        Args:
            fn: Forward and backward; returns the loss.
            batch: The micro-batch.
            reduction: How the loss combines the sequences of a batch (`sum`, `mean` of them, or a
                function that counts the terms of the mean); `control.allow_split` needs it.

        Raises:
            StepOutOfMemoryError: If nothing that is allowed helps; model and gradients are as
                before.
        """
        return SessionStep(self).run(fn, batch, reduction)

    def recovery(
        self,
        batch: object,
        *,
        others: Iterable[nn.Module] = (),
        skipped: frozenset[str] = frozenset(),
        counts_gradients: bool = True,
        max_parts: int = 1,
    ) -> StepRecovery:
        """Makes the open step one that can be repeated; for hosts.

        Args:
            batch: What the step is given.
            others: Modules outside the model that the step changes, such as a host's metrics.
            skipped: Names of attributes of modules that belong to the host.
            counts_gradients: As of `StepTransaction`.
            max_parts: Into how many parts the batch may be split.
        """
        return begin_recovery(
            SessionStep(self, max_parts=max_parts),
            self.model,
            batch,
            changing=self._changing,
            others=others,
            skipped=skipped,
            counts_gradients=counts_gradients,
        )

    def begin_step(self, batch: object = None, *, armed: bool = False) -> None:
        """Plans for a micro-batch and starts to watch it; hosts pair it with `end_step`.

        Args:
            batch: The micro-batch, read for its shape only.
            armed: Put the retry at the op in force also where the step looks safe.
        """
        if self._step is not None:
            self.abort_step(None)
        self.supervisor.before_step()
        shape = with_room(lambda: self.settings.batch_shape(batch), self._engine.ledger)
        before = self.probe.snapshot()
        self._asked = self._request(shape, before.allocated_bytes)
        decision = control.plan_step(self._costs, self._asked)
        # the last: a batch that could not be read
        armed = armed or decision.armed or self.supervisor.armed or shape.tokens <= 1
        self._open_step(shape, decision, before, armed=armed)

    def _open_step(
        self, shape: BatchShape, decision: StepDecision, before: MemorySnapshot, *, armed: bool
    ) -> None:
        self._plan = decision.plan
        self._at_boundary = False
        mode = self.settings.op_retry
        self._step = OpenStep(
            self._engine,
            self.probe,
            decision,
            before=before,
            number=self.num_steps,
            shape=shape,
            armed=mode == "always" or (mode == "auto" and armed),
            gradient_bytes=lambda: gradient_bytes(self._parameters),
            write=self.settings.journal.write,
        )

    def end_step(self) -> StepRecord:
        """Ends the micro-batch, learns from it and writes it to the journal."""
        step = self._close_step()
        outcome = step.outcome()
        self._costs = control.learn(self._costs, outcome)
        record = step.record(self._history, budget_bytes=self.budget_bytes)
        self.last_step = record
        if self.num_steps == 0 and self._num_updates == 0:  # an optimizer may drop gradients
            tell_of_untrained(self.model, self.write_notice)
        self.num_steps += 1
        event = {
            **record.to_event(),
            **control.learned_to_plain(self._asked, outcome),
            **self.supervisor.take_comparison(),
        }
        self.settings.journal.write(event)
        self.supervisor.after_step(event)
        if not self._boundaries:
            self._pass_boundary()
        return record

    def abort_step(self, error: BaseException | None) -> None:
        """Ends a micro-batch that did not finish; nothing is learned from it."""
        if self._step is None:
            return
        step = self._close_step()
        if error is not None and is_out_of_memory(error):
            event = {
                "event": "stop",
                "step": step.number,
                "reason": "out of memory, and nothing was left to evict",
                "report": f"{type(error).__name__}: {error}",
                "batch": step.shape.batch,
                "length": step.shape.length,
            }
            self.settings.journal.write(event)

    def evict(self, num_bytes: int) -> int:
        """Frees at least so many bytes now if records hold them; returns the bytes freed."""
        if num_bytes <= 0:
            raise ValueError(f"cannot evict {num_bytes} bytes: expected a number above 0.")
        return self._engine.ledger.evict(num_bytes).bytes_freed

    def switch(self, to: str | Policy, *, reason: str = "by call") -> None:
        """Puts another policy in force, at the next boundary if a step has begun since the last.

        Raises:
            ValueError: If the policy is unknown, loses precision although the recipe does not
                allow it, one of its rules matches nothing, or the policy in force is pinned.
        """
        policy = self._allowed(policy_named(to))
        self._ask(
            "switch",
            reason,
            lambda history, step: control.switched(history, policy, step=step, reason=reason),
        )

    def rollback(self, *, steps: int = 1, reason: str = "by call") -> None:
        """Goes back to the policy that was in force `steps` switches ago, at the next boundary.

        Raises:
            ValueError: If there were not so many switches, or the policy in force is pinned.
        """
        self._ask("rollback", reason, lambda history, _: control.rolled_back(history, steps=steps))

    def pin(self, to: str | Policy, *, reason: str = "by call") -> None:
        """Puts a policy in force, at the next boundary, and keeps it until `unpin`."""
        policy = self._allowed(policy_named(to))
        self._ask(
            "pin",
            reason,
            lambda history, step: control.pinned(history, policy, step=step, reason=reason),
        )

    def unpin(self) -> None:
        """Lets the policy change again, from the next boundary on."""
        self._ask("unpin", "by call", lambda history, _: control.unpinned(history))

    def report(self) -> str:
        """Returns a table of what was declared and what was measured, unit by unit."""
        return format_session_report(self._engine, self.policy, self._actions, self.last_step)

    def write_notice(self, notice: Notice) -> None:
        """Writes to the journal what was found out about a unit."""
        event = {
            "event": "notice",
            "step": self.num_steps,
            "unit": notice.unit,
            "kind": notice.kind,
            "text": notice.text,
        }
        self.settings.journal.write({**event, "figures": dict(notice.figures)})

    def state_dict(self) -> dict[str, Any]:
        """Returns policy, history and learned costs in plain types."""
        return {
            "version": STATE_VERSION,
            "units": list(self._engine.classes),
            "num_steps": self.num_steps,
            "history": control.history_to_plain(self._history),
            "costs": control.costs_to_plain(self._costs),
            "control": self.supervisor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the state that `state_dict` returned, before the first step.

        Raises:
            ValueError: If the state is damaged, or of another version or another model.
        """
        version, units = state.get("version"), list(self._engine.classes)
        if version != STATE_VERSION:
            raise ValueError(
                f"the saved state has version {version!r}: expected {STATE_VERSION}. Resume with "
                "the version of rematic that wrote it, or start without its state."
            )
        saved = list(state.get("units", []))
        if saved != units:
            raise ValueError(
                f"the saved state is of another model: it has {len(saved)} units "
                f"({_span(saved)}), this one {len(units)} ({_span(units)}). Resume with "
                "the model that was saved, or start without its state."
            )
        try:
            history = control.history_from_plain(state["history"])
            costs, num_steps = control.costs_from_plain(state["costs"]), int(state["num_steps"])
            if "control" in state:  # older states have none
                self.supervisor.load_state_dict(state["control"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the saved state is damaged ({type(error).__name__}: {error}): expected what "
                "`state_dict` returned. Resume from another checkpoint, or start without its state."
            ) from error
        self._history, self._costs, self.num_steps = history, costs, num_steps
        self._actions = resolve(self.policy, self._engine.classes)

    def detach(self) -> None:
        """Restores the model and the optimizers as they were; safe to call twice."""
        self.abort_step(None)
        for boundary in reversed(self._boundaries):
            boundary.detach()
        self._boundaries = []
        self._engine.detach()
        while self.at_detach:
            self.at_detach.pop()()

    def _request(self, shape: BatchShape, in_use_bytes: int | None) -> StepRequest:
        return StepRequest(
            tokens=shape.tokens,
            length=shape.length,
            unit_classes=tuple(self._engine.classes.values()),
            actions=self._actions,
            in_use_bytes=in_use_bytes,
            pending_gradient_bytes=pending_gradient_bytes(self._parameters),
            budget_bytes=self.budget_bytes,
            reserve=self.settings.reserve,
        )

    def _allowed(self, policy: Policy) -> Policy:
        if policy.is_lossy and not self.settings.allow_lossy:
            raise ValueError(
                f"policy {policy.name!r} loses precision (`compress`): expected a lossless one. "
                "Write `policy: {allow_lossy: true}` in the recipe to allow it, or attach with it."
            )
        resolve(policy, self._engine.classes)
        return policy

    def _close_step(self) -> OpenStep:
        if self._step is None:
            raise RuntimeError("no step is open: expected `begin_step` before `end_step`.")
        step, self._step = self._step, None
        step.close()
        return step

    def _optimizer_guard(self) -> OptimizerGuard:
        self._num_updates += 1
        covered = self.settings.op_retry != "never" and self.budget_bytes is not None
        retry = OpRetry(OptimizerRelief(self._engine.ledger))
        meter = None if self._step is None else self._step.meter
        return OptimizerGuard(retry if covered else None, meter)

    def _ask(self, event: str, reason: str, make: Callable[[History, int], History]) -> None:
        """Changes the history at the next boundary; refuses at once what could not be done then."""
        change = _Change(event=event, reason=reason, make=make)
        history = self._history
        for earlier in (*self._pending, change):
            history = earlier.make(history, self.num_steps)
        self._pending.append(change)
        if self._at_boundary:
            self._pass_boundary()

    def _pass_boundary(self) -> None:
        self._at_boundary = True
        pending, self._pending = self._pending, []
        for change in pending:
            before = self.policy
            self._history = change.make(self._history, self.num_steps)
            self._actions = resolve(self.policy, self._engine.classes)
            self._write_change(change.event, before=before, reason=change.reason)
        self.supervisor.at_boundary()

    def _write_change(self, event: str, *, before: Policy, reason: str) -> None:
        self.settings.journal.write(
            {
                "event": event,
                "from": before.name,
                "to": self.policy.name,
                "step": self.num_steps,
                "reason": reason,
                "policy": policy_to_plain(self.policy),
            }
        )

    def _write_attach(self) -> None:
        self.settings.journal.write(
            {
                "event": "attach",
                "units": list(self._engine.classes),
                "budget_bytes": self.budget_bytes,
                "capacity_bytes": self.probe.snapshot().capacity_bytes,
                "probe": self.probe.kind,
                "policy": self.policy.name,
                "ladder": [policy.name for policy in LADDER],
            }
        )


def _span(names: list[str]) -> str:
    return f"{names[0]} .. {names[-1]}" if names else "none"

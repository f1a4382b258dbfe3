"""The one facade: every integration drives a Session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from rematic import control
from rematic.accumulation_window import AccumulationWindow
from rematic.activations import Engine, Notice
from rematic.control import Change, Costs, History, StepRequest, StopReport
from rematic.memory import Probe, is_out_of_memory
from rematic.model_planner import ModelPlanner
from rematic.open_step import OpenStep
from rematic.optimizer_boundary import OptimizerBoundary
from rematic.policy import Plan, Policy, Recompute, policy_named
from rematic.policy_changes import PolicyChanges
from rematic.recovery_start import begin_recovery
from rematic.session_configuration import Configuration
from rematic.session_events import attach_event, notice_event, stop_event
from rematic.session_report import format_session_report
from rematic.session_resume import resume, saved_session
from rematic.session_settings import SessionSettings
from rematic.session_state import read_saved_session
from rematic.session_step import SessionStep
from rematic.split_batch import Reduction
from rematic.step_record import StepRecord
from rematic.step_recovery import StepRecovery
from rematic.supervisor import Supervisor
from rematic.transaction import ChangingState, num_ranks
from rematic.untrained_parameters import tell_of_untrained
from rematic.update_cover import UpdateCover

B = TypeVar("B")
T = TypeVar("T")


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
        model_planner: ModelPlanner | None = None,
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
        self._costs, self._changing = Costs(), ChangingState()
        self._num_updates, self._num_boundaries = 0, 0
        self._update_cover = UpdateCover(self)
        self.window = AccumulationWindow()
        """The update that the next micro-batch belongs to, or the last one belonged to."""
        self.has_updated = False
        """Whether an optimizer has stepped since the session was attached or took up a state."""
        self.at_stop: Callable[[StopReport], str | None] | None = None
        """Called when a training stops for good, before the error; saves a checkpoint and returns
        where it is. Buffers, generators and `num_steps` are then as behind the last optimizer step.
        If it fails, the report says why, and the training stops all the same."""
        self.split_by: str | None = "session.run(..., reduction=...)"
        """The call that takes how a loss combines sequences; None where batches are not split."""
        self._step: OpenStep | None = None
        self._asked: StepRequest | None = None
        self._policies = PolicyChanges(
            policy, engine.classes, settings.journal.write, allow_lossy=settings.allow_lossy
        )
        self._plan = Plan(actions=tuple(a or Recompute() for a in self._policies.actions))
        engine.apply(self._plan)
        self._boundaries: list[OptimizerBoundary] = []
        self._configured = Configuration(
            policy=settings.supervision.begins_with or policy,
            budget_bytes=settings.budget_bytes,
            rules=settings.supervision.rules,
        )
        self.supervisor = Supervisor(self, settings.supervision)
        """Lets the controller see every step."""
        self._policies.objection = self.supervisor.objection
        self._policies.at_agreed = self.supervisor.after_agreement
        self._model_planner = model_planner
        engine.ledger.at_notice = self.write_notice
        settings.journal.write(
            attach_event(engine, probe, policy, budget_bytes=settings.budget_bytes)
        )
        engine.tell_beginning()
        self.add_optimizers(*optimizers)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policies.history.current

    @property
    def plan(self) -> Plan:
        """The plan of the step that runs, or of the last one."""
        return self._plan

    @property
    def history(self) -> History:
        """The policies so far, the one in force last."""
        return self._policies.history

    @property
    def costs(self) -> Costs:
        """What steps need, as learned so far."""
        return self._costs

    @property
    def unit_classes(self) -> Mapping[str, str]:
        """Class of each unit by its name, in order."""
        return self._engine.classes

    @property
    def can_change(self) -> bool:
        """Whether policies may change by themselves: on one rank, or where ranks can agree."""
        return num_ranks() == 1 or self._policies.agreement is not None

    @property
    def begins_window(self) -> bool:
        """Whether the next micro-batch is the first of an update: no gradients wait for it."""
        return self._policies.at_boundary or all(p.grad is None for p in self._parameters)

    @property
    def is_behind_update(self) -> bool:
        """Whether an optimizer has stepped since the update of the last micro-batch began."""
        return self.window.num_boundaries != self._num_boundaries

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that may be in use on the device; None without a limit."""
        return self.settings.budget_bytes

    def add_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Covers optimizers made after attaching: a boundary lies after the step of each."""
        self._boundaries += [
            OptimizerBoundary(
                optimizer,
                guard=self._update_cover.guard,
                on_step=self._pass_boundary,
                on_torn=SessionStep(self).torn,
                on_failed=self._update_cover.failed,
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

        An allocation that fails is answered at the op where the step was thought risky (unless the
        recipe's `op_retry` is `never`), then at the unit. If that does not help, everything is put
        back and `fn(batch)` runs again under a heavier plan, `control.attempts`
        times at most. It must end before gradients are clipped and the optimizer steps.

        Args:
            fn: Forward and backward; returns the loss.
            batch: The micro-batch.
            reduction: How the loss combines the sequences of a batch (`sum`, `mean` of them, or a
                function that counts the terms of the mean); `control.allow_split` needs it.

        Raises:
            StepOutOfMemoryError: If nothing allowed helps; model and gradients are as before.
        """
        return SessionStep(self).run(fn, batch, reduction)

    def recovery(
        self,
        batch: object,
        *,
        code: Callable[..., Any] | None = None,
        others: Iterable[nn.Module] = (),
        skipped: frozenset[str] = frozenset(),
        counts_gradients: bool = True,
        max_parts: int = 1,
    ) -> StepRecovery:
        """Makes the open step one that can be repeated; for hosts.

        Args:
            batch: What the step is given.
            code: What runs as the step; what it reaches in closures and globals counts too.
            others: Modules outside the model that the step changes, such as a host's metrics.
            skipped: Names of attributes of modules that belong to the host.
            counts_gradients: As of `StepTransaction`.
            max_parts: Into how many parts the batch may be split.
        """
        recovery = begin_recovery(
            SessionStep(self, max_parts=max_parts),
            self.model,
            batch,
            changing=self._changing,
            code=code,
            leaves=[
                parameter
                for boundary in self._boundaries
                for group in boundary.optimizer.param_groups
                for parameter in group["params"]
            ],
            others=others,
            skipped=skipped,
            counts_gradients=counts_gradients,
        )
        if recovery.transaction is not None:
            self.window.read(recovery.transaction)
        if self._step is not None and self._asked is not None and self._asked.repeatable:
            self._step.let_units_stand_aside()
        return recovery

    def begin_step(self, batch: object = None, *, repeatable: bool = False) -> None:
        """Plans for a micro-batch and starts to watch it; hosts pair it with `end_step`.

        Args:
            batch: The micro-batch, read for its shape only.
            repeatable: Whether the caller takes a `recovery` and runs the step again by it.
        """
        if self._step is not None:
            self.abort_step(None)
        if self.begins_window:
            self.begin_window()
        self.supervisor.before_step()
        self._policies.refuse_other_start(self._engine.joint_units())
        SessionStep(self).open(batch, repeatable=repeatable)

    def begin_window(self) -> None:
        """Takes note that what follows belongs to another update; hosts need it where they stop."""
        self.window = AccumulationWindow(
            num_steps=self.num_steps, num_boundaries=self._num_boundaries
        )

    def end_step(self) -> StepRecord:
        """Ends the micro-batch, learns from it and writes it to the journal."""
        step = self._close_step()
        outcome = step.outcome()
        self._costs = control.learn(self._costs, outcome)
        record = step.record(self._policies.history, budget_bytes=self.budget_bytes)
        if self._model_planner is not None:
            self._model_planner.learn(step.decision, record, outcome, autocast=step.autocast)
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
            if self._model_planner is not None and not step.armed:
                self._model_planner.note_loss(step.decision)
            self.settings.journal.write(stop_event(step, error))

    def run_on_gradients(self, work: Callable[[], T]) -> T:
        """Runs what hosts do to gradients between a micro-batch and the optimizer's step.

        Clipping, say. Failed ops are run again, as in the optimizer's step.

        Raises:
            StepOutOfMemoryError: If that does not help; the training was saved as it was behind the
                last optimizer step, as far as a host does.
        """
        return self._update_cover.run(work)

    def evict(self, num_bytes: int) -> int:
        """Frees at least so many bytes now if records hold them; returns the bytes freed."""
        if num_bytes <= 0:
            raise ValueError(f"cannot evict {num_bytes} bytes: expected a number above 0.")
        return self._engine.ledger.evict(num_bytes).bytes_freed

    def switch(self, to: str | Policy, *, reason: str = "by call") -> None:
        """Puts another policy in force, at the next boundary if a step has begun since the last.

        On several ranks it is enough that one of them asks: the change comes on all of them, at the
        same boundary, some boundaries later. The same holds of `rollback`, `pin` and `unpin`.

        Raises:
            ValueError: If the policy is unknown, loses precision although the recipe does not
                allow it, one of its rules matches nothing, or the policy in force is pinned.
        """
        self.ask(Change(kind="switch", policy=policy_named(to), reason=reason))

    def rollback(self, *, steps: int = 1, reason: str = "by call") -> None:
        """Goes back to the policy that was in force `steps` switches ago, at the next boundary.

        Raises:
            ValueError: If there were not so many switches, or the policy in force is pinned.
        """
        self.ask(Change(kind="rollback", steps=steps, reason=reason))

    def pin(self, to: str | Policy, *, reason: str = "by call") -> None:
        """Puts a policy in force, at the next boundary, and keeps it until `unpin`."""
        self.ask(Change(kind="pin", policy=policy_named(to), reason=reason))

    def unpin(self, *, reason: str = "by call") -> None:
        """Lets the policy change again, from the next boundary on."""
        self.ask(Change(kind="unpin", reason=reason))

    def ask(self, change: Change) -> None:
        """Asks for a change of policy; `switch`, `rollback`, `pin` and `unpin` are short for it.

        Raises:
            ValueError: If it cannot be made.
        """
        self._policies.ask(change, step=self.num_steps)

    def report(self) -> str:
        """Returns a table of what was declared and what was measured, unit by unit."""
        return format_session_report(
            self._engine, self.policy, self._policies.actions, self.last_step
        )

    def write_notice(self, notice: Notice) -> None:
        """Writes to the journal what was found out about a unit."""
        self.settings.journal.write(notice_event(notice, step=self.num_steps))

    def state_dict(self) -> dict[str, Any]:
        """Returns policy, history and learned costs in plain types."""
        return saved_session(self).to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the state that `state_dict` returned, before the first step.

        A policy other than the one that the saved session was attached with follows the saved one.

        Raises:
            ForeignStateError: If the state is of another version or another model.
            ValueError: If it is damaged.
        """
        resume(self, read_saved_session(state, units=list(self._engine.classes)))

    def detach(self) -> None:
        """Restores the model and the optimizers as they were; safe to call twice."""
        self.abort_step(None)
        for boundary in reversed(self._boundaries):
            boundary.detach()
        self._boundaries = []
        self._engine.detach()
        while self.at_detach:
            self.at_detach.pop()()

    def _close_step(self) -> OpenStep:
        if self._step is None:
            raise RuntimeError("no step is open: expected `begin_step` before `end_step`.")
        step, self._step = self._step, None
        step.close()
        return step

    def _pass_boundary(self) -> None:
        self.has_updated = True
        self._num_boundaries += 1
        self._policies.pass_boundary(step=self.num_steps)
        self.supervisor.at_boundary()

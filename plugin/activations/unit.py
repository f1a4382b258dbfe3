"""One unit: its `forward`, replaced on the instance, runs under the record's hooks."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rematic.activations import torch_private
from rematic.activations.ambient import restore_generators
from rematic.activations.bodies import bodies_of, give_to
from rematic.activations.check_schedule import CheckSchedule
from rematic.activations.collectives import obstacle_to_selective, watching_collectives
from rematic.activations.compiled import is_compiled
from rematic.activations.functions_inside import host_generators_of
from rematic.activations.graphless import GRAPH_IS_SHARED, Call, Parted, joined
from rematic.activations.harmless_writes import OwnWrites
from rematic.activations.key_value_cache import FILLS_CACHE, CachesOfCall
from rematic.activations.ledger import Ledger
from rematic.activations.module_state import ModuleState
from rematic.activations.module_walk import ModuleWalk
from rematic.activations.moving import move_away
from rematic.activations.nested import ContainerContents
from rematic.activations.observers import Observers
from rematic.activations.record import Record
from rematic.activations.reused_inputs import INPUT_IS_REUSED, ReusedInputs
from rematic.activations.routing import Routing
from rematic.activations.safety import judge
from rematic.activations.selective import OpSelection, SelectiveCache
from rematic.activations.surroundings import Surroundings
from rematic.activations.tiling import Tiling
from rematic.activations.token_wise_parts import TokenWiseParts
from rematic.activations.unit_findings import UnitFindings
from rematic.activations.unit_forward import UnitForward, recording_state
from rematic.activations.unit_kind import kind_of
from rematic.memory import LastTries, is_out_of_memory, requested_bytes
from rematic.stash import Stash

_log = logging.getLogger("rematic")
_WRITES = "it writes to its parameters, and whether that changes them is not known yet"
_EVALUATES = (
    "in evaluation mode while gradients are on. It is managed all the same, without dropout: call "
    "`model.train()` to train, or evaluate under `torch.no_grad()`"
)
_FIRST_CALL = "whether it can be replayed is known only when its first call ends"


class Unit(UnitFindings):
    """A module instance whose activations are managed together.

    Its `forward` is an attribute of the instance (contract 2); `restore()` takes it away again.
    """

    def __init__(self, name: str, module: nn.Module, *, position: int, ledger: Ledger) -> None:
        super().__init__(name, ledger)
        self.position = position
        self.starts_held = False
        """Whether the next records start held (`keep`, and what is moved when the forward has
        ended: `offload`, `compress`) or evicted (`selective`, `recompute`, `recompute+offload`)."""
        self.unmeasured = False
        """Whether the next records are held until their forward ends, to see what they keep."""
        self.stands_aside = False
        """Whether calls of which all is known run as they are, without a record."""
        self.selection: OpSelection | None = None
        """Which results are kept where records start evicted (`selective`), None for none."""
        self.stash: Stash | None = None
        """Where saved tensors move when a forward has ended, or the inputs of records that start
        evicted; None for nowhere."""
        self.num_forwards = 0
        """Forwards that ran under a record."""
        self.num_retries = 0
        """Forwards run again because memory ran out."""
        self.trusted = False
        """Whether the user vouches that it can be replayed: it is not checked."""
        self.tiling: Tiling | None = None
        """Runs calls in slices (`tile`), None for whole calls."""
        self.parts: TokenWiseParts | None = None
        """Runs its token-wise parts in slices, or asks them; None for neither."""
        self.routing: Routing | None = None
        """Its routers, whose decisions replays keep; None if it has none."""
        self.agreed = False
        """Whether its action is that of the policy, and so the same on all ranks."""
        self._observers = Observers()
        self._walk = ModuleWalk()
        self._writes = OwnWrites(ledger.harmless_writes)
        self._reused_inputs = ReusedInputs()
        self._module = weakref.ref(module)
        # Names of the tensors and objects that forward changes, in training and in evaluation.
        self._mutable: dict[bool, frozenset[str]] = {}
        self._schedule = CheckSchedule()
        self._watches_hooks = True
        self._forward = UnitForward(self, module)

    @property
    def module(self) -> nn.Module:
        """The module, which the unit itself does not keep alive."""
        module = self._module()
        assert module is not None, "a unit is only called through its module"
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """What `forward` was before."""
        return self._forward.original

    def known_module(self) -> nn.Module | None:
        """Returns the module that it manages, None if that is gone."""
        return self._module()

    @property
    def is_compiled(self) -> bool:
        """Whether what it runs is compiled code, which modes around it do not see."""
        return is_compiled(self.module)

    def follow(self, module: nn.Module) -> None:
        """Manages another module from now on, or the same one that was compiled meanwhile."""
        self._forward.remove()
        if module is not self._module():
            self._module = weakref.ref(module)
            self._mutable.clear()
            self._schedule = CheckSchedule()
            self._walk = ModuleWalk()
            self.pinned, self.joint, self.graphless, self.refused = None, None, False, False
        self._forward = UnitForward(self, module)

    def is_bypassed(self) -> bool:
        """Returns whether the module was compiled after this unit had taken its place."""
        call = torch_private.compiled_call(self.module)
        return call is not None and call is not self._forward

    def restore(self) -> None:
        """Gives the module its own `forward` back."""
        self._forward.remove()
        if self.routing is not None:
            self.routing.remove()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, in slices if that is its action."""
        self.ledger.waiting.settle((args, kwargs))
        if self.stands_aside and not self.is_first_call and not self.awaits_check:
            self.num_forwards += 1
            return self.original(*args, **kwargs)
        if self.tiling is not None:
            return self.tiling.run(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, and again if memory runs out: while evicting helps, and once more."""
        caches = CachesOfCall(self.module, (args, kwargs))
        recorded = caches.for_record((args, kwargs))
        filled_cache = caches.is_filled
        self._note_unusual(caches)
        given = ContainerContents((*args, *kwargs.values()))
        self._meet_new_hooks()
        self._schedule.begin_call(self.module.training)
        surroundings = self._surroundings(recorded) if not filled_cache else None
        awaits = self.awaits_check and self._schedule.holds
        held = self.starts_held or self.unmeasured or self.is_first_call or awaits
        if self._reused_inputs and not self.starts_held:
            recorded = self._reused_inputs.copied(recorded)
        last_tries = LastTries(1)
        while True:
            record = None
            try:
                record = self._open(recorded, held=held, filled_cache=filled_cache)
                output = self._attempt(record, args, kwargs)
                if self.graphless and not record.held:
                    output = Parted(output)  # in two steps: what is left of its graph is seen then
                    output = self._joined(record, output, (args, kwargs))
            except RuntimeError as error:
                may_help = held or last_tries.are_left or self.ledger.resident_bytes() > 0
                if not may_help or not self._can_run_again(error, record, surroundings):
                    raise
                failure = str(error)
                # None: memory ran out while its state was taken down, and forward has not begun
                before = None if record is None else (record.module_state, record.ambient)
                wanted = requested_bytes(error)
            else:
                self._close(record, surroundings)
                return output
            # outside `except`: the failed attempt is freed before anything is tried again
            del record
            eviction = self.ledger.evict(wanted)
            if (awaits or not held) and not eviction.bytes_freed and not last_tries.take():
                raise torch.OutOfMemoryError(failure)
            self.num_retries += 1
            if self.ledger.at_unit_retry is not None:
                self.ledger.at_unit_retry(self.name, wanted, eviction)
            # nothing left to let go: this record starts evicted, if it is known that it can be
            held = awaits or (held and eviction.bytes_freed > 0)
            if before is not None:
                before[0].restore()
                restore_generators(before[1])
                given.restore()
                caches.restore()

    def _note_unusual(self, caches: CachesOfCall) -> None:
        if caches.are_written:
            self.note_for_all(FILLS_CACHE)
        if not self.module.training:
            self.note_for_all(_EVALUATES)

    def _joined(self, record: Record, parted: Parted, call: Call) -> Any:
        if record.live_holders():
            self.graphless = False
            self.note_once(GRAPH_IS_SHARED)
        return joined(record, parted, call, self.ledger)

    def _open(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], *, held: bool, filled_cache: bool
    ) -> Record:
        cache = self._cache(call)
        bodies = bodies_of(self, has_cache=cache is not None)
        module = self.module
        record = Record(
            bodies[-1],
            call,
            name=self.name,
            position=self.position,
            module_state=ModuleState(
                module, self._mutable.get(module.training), self._walk, self._writes
            ),
            held=held or filled_cache or self.pinned is not None,
            cache=cache,
            observers=self._observers,
        )
        record.trusted = self.trusted
        give_to(record, bodies)
        if filled_cache:
            record.pinned = "it was given a filled key/value cache"
            self.note_once(f"its activations are kept in this call: {record.pinned}")
        elif self.pinned is None and (self.is_first_call or self.awaits_check):
            record.pinned = _FIRST_CALL
        else:
            record.pinned = self.pinned or self.joint
        self.ledger.open(record)
        return record

    def _cache(self, call: Call) -> SelectiveCache | None:
        if self.selection is None or self.starts_held:
            return None
        reason = obstacle_to_selective(self)
        if reason is not None:
            self.note_once(f"it is recomputed whole where it should be selective, since {reason}")
            return None
        return self.selection.open_cache(call)

    def _attempt(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_forwards += 1
        start = time.perf_counter()
        hooks = saved_tensors_hooks(record.pack, self.ledger.unpack)
        recording_state.recording = True
        try:
            if record.cache is None and not self._watches_hooks:
                with hooks:
                    output = record.forward(*args, **kwargs)
            else:
                with hooks, self._further_contexts(record):
                    output = record.forward(*args, **kwargs)
        finally:
            recording_state.recording = False
            self._writes.settle(record.module_state.parameters)
        record.forward_seconds = time.perf_counter() - start
        return output

    def _further_contexts(self, record: Record) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        if record.cache is not None:
            stack.enter_context(record.cache.recording())
        if self._watches_hooks:
            self._observers.take_own_hooks(self.module, self._forward.is_around_hooks)
            modules = record.module_state.inner_modules()
            stack.enter_context(self._observers.watching(modules))
        if self.is_first_call and not self.is_compiled:
            stack.enter_context(watching_collectives(self))
            if self._writes.awaits(self.module.training):
                stack.enter_context(self._writes.watching(self.module.training))
        return stack

    def _close(self, record: Record, surroundings: Surroundings | None) -> None:
        first, awaited = self.is_first_call, self.awaits_check
        parameters, training = record.module_state.parameters, self.module.training
        if first and not self.is_compiled and self._writes.suspect(parameters, training):
            record.pinned = _WRITES  # the next call is taken for the first, and watched
        elif first:
            kinds = set(map(type, self.module.modules()))
            named = frozenset().union(*map(host_generators_of, kinds))
            self._mutable[self.module.training] = record.module_state.changed_names() | named
        record.module_state.leave_graphs()
        if self.tiling is None:  # slices share the storage of the whole
            self.ledger.shared_inputs.learn(record)
        if record.pinned == _FIRST_CALL:
            record.pinned = self.joint
        if record.arguments.mutated_positions():
            self.pin(record, "it changes its input in place. Clone the input inside the unit")
        elif first and record.pinned != _WRITES and self._writes.remain(parameters):
            self.pin(record, "it changes its parameters in place")
        elif awaited and record.pinned is None:
            self._check_after(record, surroundings)
        elif record.module_state.changed_outside():
            self._schedule.look_again(training)
        if record.cache is not None and not record.cache.is_usable():
            record.cache = None
        starts_evicted = not self.starts_held and record.pinned is None
        lets_go = starts_evicted and (first or self.unmeasured or awaited)
        if self.ledger.after_forward is not None:
            record.leaves = lets_go or (self.stash is not None and record.held)
            self.ledger.after_forward(record)
            record.leaves = False
        if first and not self.unmeasured:  # planning measures a step that lets go at once
            self.ledger.waiting.add(record, functools.partial(self._settle, lets_go=lets_go))
        else:
            self._let_go(record, lets_go=lets_go)

    def _settle(self, record: Record, *, lets_go: bool) -> None:
        """Ends a first call when the next begins: by now its input may have been changed."""
        if not self._reused_inputs.learn(record):
            self._let_go(record, lets_go=lets_go)
        elif lets_go:
            self.note_once(INPUT_IS_REUSED)

    def _let_go(self, record: Record, *, lets_go: bool) -> None:
        if lets_go:
            record.let_go()
        if self.stash is not None:
            shared = self.ledger.shared_inputs.of(record)
            move_away(record, self.stash, self.note_once, shared=shared)
        if (lets_go or self.stash is not None) and self.ledger.after_leaving is not None:
            self.ledger.after_leaving()

    @property
    def awaits_check(self) -> bool:
        """Whether its calls (in this mode) have to show first that they can be replayed."""
        can_be = not self.trusted and self.pinned is None and self.joint is None
        return can_be and self._schedule.awaits(self.module.training)

    def _meet_new_hooks(self) -> None:
        """Watches hooks that were registered since they were watched, and checks once more."""
        is_new = self._observers.has_unknown(self._walk.inner_modules())
        if is_new:
            self._schedule.forget(self.module.training)
        self._watches_hooks = is_new or self.is_first_call

    def _surroundings(self, call: Call) -> Surroundings | None:
        if not (self.awaits_check and self._schedule.surveys(self.module.training)):
            return None
        routers = () if self.routing is None else self.routing.modules()
        return Surroundings(self.module, call, left_out=routers)

    def _check_after(self, record: Record, surroundings: Surroundings | None) -> None:
        """Checks a unit that changed nothing outside of itself, or not for the second time."""
        changed = None if surroundings is None else surroundings.change()
        if surroundings is not None:
            self._walk.outside = surroundings.watch()
        training, unseen = self.module.training, self._schedule.unseen()
        if changed is None or not record.num_slots:
            self._schedule.found_nothing(training)
            if record.num_slots:
                self._check(record)
        elif self._schedule.is_first_change(training):
            record.pinned = f"it changed {changed}"
            self.note_once(f"its activations are kept in this call: {record.pinned}{unseen}")
        else:
            again = f"its forward changes {changed}, which a replay would change again"
            self.refuse(record, f"{again}{unseen}")

    def _check(self, record: Record) -> None:
        num_hooks = self._observers.num_present(record.module_state.inner_modules())
        kind = kind_of(self.module, num_hooks=num_hooks)
        verdicts = self.ledger.verdicts
        if kind not in verdicts:
            try:
                verdicts[kind] = judge(record, self.routing, is_compiled=self.is_compiled)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return  # there is no room to check it; the next unit of the class will be
        verdict = verdicts[kind]
        if verdict.hooks_act:
            self._observers.forget()
        if verdict.hidden is not None and verdict.hidden.matters:
            self.take_note_of(verdict.hidden)
        if verdict.objection is not None:
            self.refuse(record, verdict.objection)

    @property
    def is_first_call(self) -> bool:
        """Whether it is not known yet which tensors forward changes (in this mode)."""
        return self.module.training not in self._mutable

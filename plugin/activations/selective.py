"""Keeps the results of chosen ops of a unit's forward for its replay.

The caching is torch's (`create_selective_checkpoint_contexts`); what is kept is decided here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rematic.activations import torch_private
from rematic.activations.kept_values import version_of
from rematic.activations.nested import iter_leaves, map_leaves
from rematic.memory import autocast_of_call
from rematic.policy import OpName, parse_op_name

_log = logging.getLogger("rematic")
CallKind: TypeAlias = tuple[tuple[tuple[type, bool], ...], tuple[str, ...]]
"""Types of the arguments of a call with whether they need a gradient, and the names of some."""
_DROPOUTS = frozenset({"dropout_p", "p_dropout", "dropout"})
"""What kernels call the chance of their dropout."""


AtMissing: TypeAlias = Callable[[str, Sequence[str], Collection[str]], None]


def warn_of_missing(unit_name: str, missing: Sequence[str], seen: Collection[str]) -> None:
    """Warns of ops that the user named and that a unit does not run."""
    for written in missing:
        _log.warning(
            "unit %r: the op %r that selective should keep never occurs; the ops of this unit are "
            "%s.",
            unit_name,
            written,
            ", ".join(sorted(seen)),
        )


class OpSelection:
    """Which ops of one unit are kept, and what is known of its forward.

    Args:
        unit_name: The unit.
        save: Names of the ops.
        at_missing: Called after the first forward with the unit, the names that mean no op of it,
            and its ops, if there are such names; None for nothing.
    """

    def __init__(
        self, unit_name: str, save: tuple[str, ...], *, at_missing: AtMissing | None
    ) -> None:
        self.save = save
        """The names, as they were given."""
        self._unit_name = unit_name
        self._names = [parse_op_name(written) for written in save]
        self._by_op: dict[str, list[OpName]] = {}
        for one in self._names:
            for op in one.ops:
                self._by_op.setdefault(op, []).append(one)
        self._at_missing = at_missing
        # By kind of call: how many ops a replay needs at most, so that none beyond is kept.
        self._num_needed: dict[CallKind, int] = {}
        self._changed: set[tuple[Any, int]] = set()

    def open_cache(self, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> SelectiveCache:
        """Returns an empty cache for one call with these arguments."""
        return SelectiveCache(self, _kind_of(call))

    def keeps(
        self,
        func: Any,
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        before: Counter[str],
    ) -> bool:
        """Returns whether the result of one op is kept.

        Args:
            func: The op, whatever the dispatcher passes.
            call: Its positional and its keyword arguments.
            before: How often each op ran before it.
        """
        wanted = self._by_op.get(func._schema.name)
        if wanted is None or not any(_is_next(op, before) for op in wanted):
            return False
        return not (is_random(func, *call) or _changes_or_views(func))

    def is_needed(self, kind: CallKind, index: int) -> bool:
        """Returns whether a replay may come to the op before which `index` others ran.

        (A replay stops at the last tensor that was saved. Only a forward shows where that is: what
        it kept in vain goes when it has ended, what calls of its kind never needed is not kept.)
        """
        known = self._num_needed.get(kind)
        return known is None or index < known

    def is_changed(self, func: Any, number: int) -> bool:
        """Returns whether a unit was seen to change the result of this call of an op in place."""
        return (func, number) in self._changed

    def learn(self, kind: CallKind, *, num_needed: int, seen: Counter[str]) -> None:
        """Takes note, at the end of a forward, of the ops a replay needs and of those seen."""
        if not self._num_needed and self._at_missing is not None:
            missing = [
                op.written
                for op in self._names
                if not any(seen[name] > (op.occurrence or 0) for name in op.ops)
            ]
            if missing:
                self._at_missing(self._unit_name, missing, seen)
        self._num_needed[kind] = max(num_needed, self._num_needed.get(kind, 0))

    def learn_change(self, func: Any, number: int) -> None:
        """Takes note that what a call of an op returned is changed in place after it is kept."""
        if not self._changed:
            _log.warning(
                "unit %r: the result of %s, which selective should keep, is changed in place. This "
                "call is recomputed; from the next on a copy of that result is kept. Leave the op "
                "out of `save`, or the in-place op out of the unit, to do without the copy.",
                self._unit_name,
                func,
            )
        self._changed.add((func, number))


def _is_next(op: OpName, before: Counter[str]) -> bool:
    """Returns whether the next call of one of these ops is the one that is named."""
    return op.occurrence is None or sum(before[name] for name in op.ops) == op.occurrence


class SelectiveCache:
    """The results that one call keeps."""

    def __init__(self, selection: OpSelection, kind: CallKind) -> None:
        self._selection = selection
        # An object of its own: were it `self`, torch's contexts would close a reference cycle.
        self._decider = _Decider(selection, kind)
        contexts = create_selective_checkpoint_contexts(self._decider.decide)  # type: ignore[no-untyped-call] # torch 2.13
        self._in_forward, self._in_replay = contexts
        for context in contexts:  # what is compiled inside of the unit stays compiled
            context.ignore_compile_internals = _yes
            mode: Any = type(context)
            context.__class__ = _under_autocast_of_call(mode)

    def note_slot(self) -> None:
        """Takes note that a tensor was saved for backward: a replay must come this far."""
        self._decider.num_ops_at_last_slot = self._decider.num_ops

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what is kept."""
        for _, _, tensor, _ in torch_private.selective_results(self._in_forward):
            yield tensor
        for _, _, result in self._decider.copies:
            yield from iter_leaves(result)

    def is_usable(self) -> bool:
        """Returns whether nothing that is kept was changed in place in the meantime."""
        changed = {
            (op, number)
            for op, number, tensor, version in torch_private.selective_results(self._in_forward)
            if version_of(tensor) != version or (op, number) in self._decider.changed
        }
        for op, number in changed:
            self._selection.learn_change(op, number)
        return not changed

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps results in the forward that runs in the body."""
        with self._in_forward:
            yield
        decider = self._decider
        num_needed = decider.num_ops_at_last_slot
        self._selection.learn(decider.kind, num_needed=num_needed, seen=decider.seen)
        copies, decider.copies = decider.copies, []
        for op, number, result in copies:
            torch_private.put_selective_result(self._in_forward, op, number, result)
        for index, op, number in decider.kept:
            if index >= num_needed:
                torch_private.put_selective_result(self._in_forward, op, number, None)

    def replaying(self) -> contextlib.AbstractContextManager[Any]:
        """Gives results back to the replay that runs in the body, each one once."""
        return self._in_replay  # type: ignore[no-any-return] # torch 2.13 leaves it untyped


def _yes() -> bool:
    return True


@functools.cache
def _under_autocast_of_call(mode: Any) -> Any:
    """Returns a dispatch mode of torch that leaves autocast to the op as its caller had it."""

    def handle(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with autocast_of_call(func):
            return handle_alone(self, func, types, args, kwargs)

    handle_alone = mode.__torch_dispatch__
    return type(mode.__name__, (mode,), {"__torch_dispatch__": handle})


class _Decider:
    """Counts the ops of one forward and decides of each whether its result is kept."""

    def __init__(self, selection: OpSelection, kind: CallKind) -> None:
        self._selection = selection
        self._num_calls: Counter[Any] = Counter()
        self.kind = kind
        self.seen: Counter[str] = Counter()
        self.num_ops = 0
        self.num_ops_at_last_slot = 0
        self.kept: list[tuple[int, Any, int]] = []
        """What is kept: how many ops ran before, the op, which of its calls."""
        self.copies: list[tuple[Any, int, Any]] = []
        """Copies of results that will be changed in place: the op, which of its calls, result."""
        self.changed: set[tuple[Any, int]] = set()
        """Results that were changed in place, the op and which of its calls."""
        self._storages: dict[int, tuple[Any, int]] = {}

    def decide(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        index, number = self.num_ops, self._num_calls[func]
        keeps = self._selection.is_needed(self.kind, index) and self._selection.keeps(
            func, (args, kwargs), before=self.seen
        )
        self._note_changes(func, args, kwargs)
        self.num_ops += 1
        self._num_calls[func] += 1
        self.seen[func._schema.name] += 1
        if not keeps:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.kept.append((index, func, number))
        if self._selection.is_changed(func, number):
            copy = map_leaves(torch.clone, context.op_output)
            self.copies.append((func, number, copy))
            return CheckpointPolicy.PREFER_RECOMPUTE
        for tensor in iter_leaves(context.op_output):
            key = torch_private.storage_key(tensor)
            if key is not None:
                self._storages[key] = (func, number)
        return CheckpointPolicy.MUST_SAVE

    def _note_changes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # By storage: what `_unsafe_view` (a linear layer without bias, of three dimensions),
        # `unsafe_split` (cells of GRU and LSTM) and `.data` make counts its changes apart.
        if not (self._storages and func._schema.is_mutable):
            return
        arguments = func._schema.arguments
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | {**kwargs}
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in iter_leaves([given.get(name) for name in written]):
            key = torch_private.storage_key(tensor)
            if key in self._storages:
                self.changed.add(self._storages[key])


def _kind_of(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> CallKind:
    """Returns which arguments are given, of what type, and whether they need a gradient."""
    values = [*call[0], *call[1].values()]
    kinds = tuple((type(value), getattr(value, "requires_grad", False)) for value in values)
    return kinds, tuple(call[1])


def is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Returns whether an op, with these arguments, draws random numbers.

    An attention kernel draws only for its dropout; those of other packages carry no tag that says
    so, and are known by the name of that argument.
    """
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    given.update(kwargs or {})
    for argument in func._schema.arguments:
        if argument.name in _DROPOUTS:
            chance = given.get(argument.name, argument.default_value)
            return chance is not None and float(chance) > 0
    return torch.Tag.nondeterministic_seeded in func.tags


def _changes_or_views(func: Any) -> bool:
    returns_alias = any(output.alias_info is not None for output in func._schema.returns)
    return bool(func._schema.is_mutable) or returns_alias

"""Keeps the results of chosen ops of a unit's forward for its replay.

The caching is torch's (`create_selective_checkpoint_contexts`); what is kept is decided here.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rematic.activations import torch_private
from rematic.activations.module_state import version_of
from rematic.policy import OpName, parse_op_name

_log = logging.getLogger("rematic")
_DROPOUTS = frozenset({"dropout_p", "p_dropout", "dropout"})
"""What kernels call the chance of their dropout."""


class OpSelection:
    """Which ops of one unit are kept, and what is known of its forward."""

    def __init__(self, unit_name: str, save: tuple[str, ...], *, asked_for: bool) -> None:
        self.save = save
        """The names, as they were given."""
        self._unit_name = unit_name
        self._names = [parse_op_name(written) for written in save]
        self._asked_for = asked_for
        self._num_needed: int | None = None
        self.is_useless = False
        """Whether the unit changes a kept result in place, so that it is recomputed instead."""

    def open_cache(self) -> SelectiveCache:
        """Returns an empty cache for one call."""
        return SelectiveCache(self)

    def keeps(
        self,
        func: Any,
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        index: int,
        before: Counter[str],
    ) -> bool:
        """Returns whether the result of one op is kept.

        Args:
            func: The op, whatever the dispatcher passes.
            call: Its positional and its keyword arguments.
            index: How many ops ran before it in this forward.
            before: How often each op ran before it.
        """
        if self._num_needed is not None and index >= self._num_needed:
            return False  # a replay stops before it comes to this op
        name = func._schema.name
        if not any(self._means(op, name, before) for op in self._names):
            return False
        return not (is_random(func, *call) or _changes_or_views(func))

    def learn(self, *, num_needed: int, seen: Counter[str]) -> None:
        """Takes note, at the end of a forward, of the ops a replay needs and of those seen."""
        if self._num_needed is None and self._asked_for:
            for op in self._names:
                if not any(seen[name] > (op.occurrence or 0) for name in op.ops):
                    _log.warning(
                        "unit %r: the op %r that selective should keep never occurs; the ops of "
                        "this unit are %s.",
                        self._unit_name,
                        op.written,
                        ", ".join(sorted(seen)),
                    )
        self._num_needed = max(num_needed, self._num_needed or 0)

    def give_up(self, op: str) -> None:
        """Takes note that the result of `op` is changed in place after it is kept."""
        if not self.is_useless:
            self.is_useless = True
            _log.warning(
                "unit %r: the result of %s, which selective should keep, is changed in place; the "
                "unit is recomputed instead. Leave that op out of `save`, or the in-place op out "
                "of the unit.",
                self._unit_name,
                op,
            )

    def _means(self, op: OpName, name: str, before: Counter[str]) -> bool:
        if name not in op.ops:
            return False
        return op.occurrence is None or sum(before[n] for n in op.ops) == op.occurrence


class SelectiveCache:
    """The results that one call keeps."""

    def __init__(self, selection: OpSelection) -> None:
        self._selection = selection
        # An object of its own: were it `self`, torch's contexts would close a reference cycle.
        self._decider = _Decider(selection)
        contexts = create_selective_checkpoint_contexts(self._decider.decide)  # type: ignore[no-untyped-call] # torch 2.13
        self._in_forward, self._in_replay = contexts
        for context in contexts:  # what is compiled inside of the unit stays compiled
            context.ignore_compile_internals = _yes

    def note_slot(self) -> None:
        """Takes note that a tensor was saved for backward: a replay must come this far."""
        self._decider.num_ops_at_last_slot = self._decider.num_ops

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what is kept."""
        for _, tensor, _ in torch_private.selective_results(self._in_forward):
            yield tensor

    def is_usable(self) -> bool:
        """Returns whether nothing that is kept was changed in place in the meantime."""
        results = torch_private.selective_results(self._in_forward)
        mutated = [op for op, tensor, version in results if version_of(tensor) != version]
        if mutated:
            self._selection.give_up(mutated[0])
        return not mutated

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps results in the forward that runs in the body."""
        with self._in_forward:
            yield
        decider = self._decider
        self._selection.learn(num_needed=decider.num_ops_at_last_slot, seen=decider.seen)

    def replaying(self) -> contextlib.AbstractContextManager[Any]:
        """Gives results back to the replay that runs in the body, each one once."""
        return self._in_replay  # type: ignore[no-any-return] # torch 2.13 leaves it untyped


def _yes() -> bool:
    return True


class _Decider:
    """Counts the ops of one forward and decides of each whether its result is kept."""

    def __init__(self, selection: OpSelection) -> None:
        self._selection = selection
        self.seen: Counter[str] = Counter()
        self.num_ops = 0
        self.num_ops_at_last_slot = 0

    def decide(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = self._selection.keeps(func, (args, kwargs), index=self.num_ops, before=self.seen)
        self.num_ops += 1
        self.seen[func._schema.name] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


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

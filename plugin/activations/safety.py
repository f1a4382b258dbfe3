"""The safety check: one replay of a unit, compared with its forward bit by bit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations import torch_private
from rematic.activations.hidden_stash import find_hidden_stash
from rematic.activations.kept_values import version_of
from rematic.activations.ledger import Verdict
from rematic.activations.record import Record
from rematic.activations.replay import EveryHolderFilled, ReplayError, check_slot, run_again
from rematic.activations.routing import Routing
from rematic.memory import autocast_of_call, is_out_of_memory

_RECURRENT = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
"""Ops that return a workspace for their backward, bytes with gaps that nobody writes."""


def judge(record: Record, routing: Routing | None, *, is_compiled: bool) -> Verdict:
    """Replays a unit and says what that shows of all of its kind.

    Args:
        record: A record that still holds everything.
        routing: Its routers, None if it has none.
        is_compiled: Whether it runs compiled code.

    Raises:
        RuntimeError: If memory runs out, which proves nothing.
    """
    num_silent = record.observers.num_silent
    reason = objection(record)
    if reason is not None and routing is not None and routing.may_skip:
        routing.may_skip = False  # its block may read what it leaves on itself
        reason = objection(record)
    hooks_act = record.observers.num_silent < num_silent
    # decisions of routers are kept as leaves: a graph made again would end at them
    measurable = reason is None and routing is None and not is_compiled
    hidden = find_hidden_stash(record) if measurable else None
    return Verdict(objection=reason, hooks_act=hooks_act, hidden=hidden)


def objection(record: Record) -> str | None:
    """Returns why a unit cannot be replayed, None if it can.

    Replays a record that still holds everything. Hooks that only look on are left out; if that
    goes wrong and a replay with them does not, they stay in.

    Raises:
        RuntimeError: If memory runs out, which proves nothing.
    """
    reason = _compare(record, holds=False)
    if reason is not None:  # a unit that calls autograd.grad in itself needs what a replay saves
        reason = _compare(record, holds=True)
    if reason is not None and record.observers.num_silent:
        record.observers.forget()
        reason = _compare(record, holds=True)
    return reason


def _compare(record: Record, *, holds: bool, workspaces: _Workspaces | None = None) -> str | None:
    comparison = _Comparison(record, holds=holds, workspaces=workspaces)
    try:
        with contextlib.nullcontext() if workspaces is None else workspaces:
            run_again(record, comparison.pack, cached=False)
    except EveryHolderFilled:
        return None
    except ReplayError as error:
        if comparison.bytes_differ and workspaces is None:
            return _compare(record, holds=holds, workspaces=_Workspaces())
        return str(error)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"a replay of it raises {type(error).__name__}: {error}"
    missing = record.num_slots - comparison.num_slots
    return f"a replay of it saves {missing} tensors less than its forward" if missing else None


class _Comparison:
    """The pack hook of the check: what the replay saves is compared and, mostly, let go."""

    def __init__(
        self, record: Record, *, holds: bool, workspaces: _Workspaces | None = None
    ) -> None:
        self.num_slots = 0
        self.bytes_differ = False
        """Whether what differed was plain bytes, which may be a workspace."""
        self._workspaces = workspaces
        self._holds = holds
        self._record = record
        self._held = {
            holder.index: holder.tensor
            for holder in record.live_holders()
            if holder.tensor is not None
            and not holder.external
            and version_of(holder.tensor) == holder.version
        }

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.num_slots
        self.num_slots += 1
        check_slot(self._record, index, tensor)
        held = self._held.get(index)
        known = self._workspaces is not None and self._workspaces.has(tensor)
        if held is not None and not known and not _same_bits(held, tensor):
            self.bytes_differ = tensor.dtype == torch.uint8
            raise ReplayError(
                f"a replay of unit {self._record.name!r} makes other values at position {index} "
                f"({self._record.metadata_of(index)}): something outside torch decides them (a "
                "generator of another library, a counter, a kernel that is not deterministic)"
            )
        if self.num_slots == self._record.num_slots:
            raise EveryHolderFilled
        return tensor.detach() if self._holds else tensor.new_empty(0)


class _Workspaces(TorchDispatchMode):
    """Knows the workspaces that ops return: equal inputs and results vouch for what is in them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch 2.13
        self._storages: set[int | None] = set()

    def has(self, tensor: torch.Tensor) -> bool:
        return torch_private.storage_key(tensor) in self._storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with autocast_of_call(func):
            output = func(*args, **(kwargs or {}))
        if func._schema.name in _RECURRENT:
            found = [one for one in output if one.dtype == torch.uint8]
            self._storages |= {torch_private.storage_key(one) for one in found}
        return output


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or torch.equal(a, b):
        return True
    # not equal by value: the same if every element that differs is undefined in both
    return bool(((a == b) | ((a != a) & (b != b))).all())

"""The safety check: one replay of a unit, compared with its forward bit by bit."""

from __future__ import annotations

import torch

from rematic.activations.hidden_stash import find_hidden_stash
from rematic.activations.kept_values import version_of
from rematic.activations.ledger import Verdict
from rematic.activations.record import Record
from rematic.activations.replay import EveryHolderFilled, ReplayError, check_slot, run_again
from rematic.activations.routing import Routing
from rematic.memory import is_out_of_memory


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


def _compare(record: Record, *, holds: bool) -> str | None:
    comparison = _Comparison(record, holds=holds)
    try:
        run_again(record, comparison.pack, cached=False)
    except EveryHolderFilled:
        return None
    except ReplayError as error:
        return str(error)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"a replay of it raises {type(error).__name__}: {error}"
    missing = record.num_slots - comparison.num_slots
    return f"a replay of it saves {missing} tensors less than its forward" if missing else None


class _Comparison:
    """The pack hook of the check: what the replay saves is compared and, mostly, let go."""

    def __init__(self, record: Record, *, holds: bool) -> None:
        self.num_slots = 0
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
        if held is not None and not _same_bits(held, tensor):
            raise ReplayError(
                f"a replay of unit {self._record.name!r} makes other values at position {index} "
                f"({self._record.metadata_of(index)}): something outside torch decides them (a "
                "generator of another library, a counter, a kernel that is not deterministic)"
            )
        if self.num_slots == self._record.num_slots:
            raise EveryHolderFilled
        return tensor.detach() if self._holds else tensor.new_empty(0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or torch.equal(a, b):
        return True
    # not equal by value: the same if every element that differs is undefined in both
    return bool(((a == b) | ((a != a) & (b != b))).all())

"""Runs a unit's forward again and fills the empty holders of its record.

A replay is a transaction: everything it sets is restored, also when it fails (an allocation inside
a replay may fail too, and the replay is then tried again).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rematic.activations import torch_private
from rematic.activations.ambient import applied
from rematic.activations.kept_values import version_of
from rematic.activations.record import STALE, Record, SlotMetadata
from rematic.memory import is_out_of_memory

_state = threading.local()


class ReplayError(RuntimeError):
    """A replay did not do what forward did, so the gradients could not be trusted."""


class EveryHolderFilled(BaseException):
    """Stops a replay early: nothing after this point is needed."""


def replaying() -> bool:
    """Returns whether the calling code runs inside a replay, and so has run before.

    For code with effects outside torch: counters, logs, caches.
    """
    return getattr(_state, "depth", 0) > 0


class _Refill:
    """The pack hook of a replay: compares every slot with forward's and keeps what is missing."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.num_slots = 0
        self.filled: dict[int, tuple[torch.Tensor, int]] = {}
        self.missing = {
            holder.index: holder.version
            for holder in record.live_holders()
            if holder.tensor is None and holder.handle is None
        }
        self.last = max(self.missing, default=-1)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.num_slots
        self.num_slots += 1
        check_slot(self.record, index, tensor)
        alias = tensor.detach() if tensor.requires_grad else tensor
        if index in self.missing:
            self._refuse_changed(index, tensor)
            self.filled[index] = (alias, version_of(tensor))
        if index == self.last:
            raise EveryHolderFilled
        return alias

    def _refuse_changed(self, index: int, tensor: torch.Tensor) -> None:
        # Only a tensor from outside (no argument, parameter or buffer) still has the storage that
        # it had in forward. Versions of what the unit makes itself prove nothing: linear layers
        # count differently under a dispatch mode.
        wanted = self.record.metadata_of(index)
        alive = None if wanted is None or wanted.storage is None else wanted.storage()
        if alive is None or torch_private.key_of_storage(alive) != torch_private.storage_key(
            tensor
        ):
            return
        if self.missing[index] not in (STALE, version_of(tensor)):
            raise ReplayError(
                f"cannot replay unit {self.record.name!r}: the tensor it saved at position {index} "
                f"({wanted}) was changed in place after its forward. Clone it "
                "before the in-place operation, or keep this unit with a rule whose action is "
                "`keep`."
            )


_ADVICE = (
    "Its forward does not do the same twice: look for state outside torch (a cache that grows, a "
    "Python random number, a flag changed between forward and backward), guard it with "
    "`rematic.replaying()`, or keep this unit with a rule whose action is `keep`."
)


_ADVICE_WHERE_TRUSTED = (
    "As it is named by `policy.trust`, no replay of it was compared with its forward, and hooks "
    "that return nothing were taken for observers and left out. Some gather weights or exchange "
    "`param.data`: take the unit out of `policy.trust`, and its first call tells which hooks must "
    "run again, or whether it has to be kept."
)


def _advice(record: Record) -> str:
    return f"{_ADVICE} {_ADVICE_WHERE_TRUSTED}" if record.trusted else _ADVICE


def save_again(tensor: torch.Tensor) -> None:
    """Takes the next slot of the replay that runs, as if autograd had saved the tensor."""
    _state.pack(tensor)


def counts_ops() -> bool:
    """Returns whether the replay that runs finds kept results by counting ops, so none may lack."""
    return getattr(_state, "counts_ops", False)


def skip_slot() -> None:
    """Passes over the next slot of the replay that runs, whose holder is never empty."""
    _state.pack.__self__.num_slots += 1


@contextlib.contextmanager
def announced_as_replay() -> Iterator[None]:
    """Lets `replaying()` say yes in the body, where units do not record either."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1


def replay(record: Record) -> None:
    """Fills every empty holder of `record` that autograd still needs.

    Raises:
        ReplayError: If the replay saves other tensors than forward did, or an input or parameter
            was changed in place in between.
    """
    refuse_changed_inputs(record)
    refill = _Refill(record)
    if not refill.missing:
        return
    record.num_replays += 1
    try:
        run_again(record, refill.pack, cached=True)
    except EveryHolderFilled:
        _fill(record, refill)
        return
    except RuntimeError as error:
        if not record.trusted or isinstance(error, ReplayError) or is_out_of_memory(error):
            raise
        raise ReplayError(
            f"the replay of unit {record.name!r} fails: {str(error).rstrip('.')}. {_advice(record)}"
        ) from error
    raise ReplayError(
        f"the replay of unit {record.name!r} saved {refill.num_slots} tensors where its "
        f"forward saved {record.num_slots}. {_advice(record)}"
    )


def check_slot(record: Record, index: int, tensor: torch.Tensor) -> None:
    """Compares what a replay saves at a position with what forward saved there.

    Raises:
        ReplayError: If forward saved nothing there, or a tensor of another kind.
    """
    if index >= record.num_slots:
        raise ReplayError(
            f"the replay of unit {record.name!r} saved more than the {record.num_slots} "
            f"tensors its forward saved. {_advice(record)}"
        )
    wanted = record.metadata_of(index)
    if wanted is not None and not wanted.fits(tensor):
        found = SlotMetadata(tensor.shape, tensor.dtype, tensor.device, None)
        raise ReplayError(
            f"the replay of unit {record.name!r} made another tensor at position "
            f"{index}: forward saved {wanted}, the replay {found}. {_advice(record)}"
        )


def run_again(
    record: Record, pack: Callable[[torch.Tensor], torch.Tensor], *, cached: bool
) -> None:
    """Runs the forward of a record again, in the state it ran in, and restores everything.

    Args:
        record: The record.
        pack: Takes what is saved; raises `EveryHolderFilled` when nothing more is needed.
        cached: Whether results kept by `selective` are used (each can be used once).

    Raises:
        EveryHolderFilled: As `pack` raised it.
    """
    outer = getattr(_state, "pack", None)
    _state.pack = pack
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _as_packed)
    try:
        with as_in_forward(record, cached=cached) as (args, kwargs), hooks:
            record.forward(*args, **kwargs)
    finally:
        _state.pack = outer


@contextlib.contextmanager
def as_in_forward(
    record: Record, *, cached: bool
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Shows the body what the forward of a record saw, and restores everything after it.

    Args:
        record: The record.
        cached: Whether results kept by `selective` are used (each can be used once).

    Yields:
        Arguments for the forward, fresh leaves of the graph that it makes.
    """
    record.busy = True
    outer = counts_ops()
    _state.depth = getattr(_state, "depth", 0) + 1
    _state.counts_ops = cached and record.cache is not None
    try:
        cache = record.cache.replaying() if cached and record.cache else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            stack.enter_context(applied(record.ambient))
            stack.enter_context(record.module_state.replayed())
            stack.enter_context(record.observers.silenced(record.module_state.inner_modules()))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(cache)
            yield record.arguments.rebuild()
    finally:
        record.module_state.writes.settle(record.module_state.parameters)
        _state.depth, _state.counts_ops = _state.depth - 1, outer
        record.busy = False


def _as_packed(tensor: torch.Tensor) -> torch.Tensor:
    # a unit that calls autograd.grad inside itself unpacks during the replay
    return tensor


def _fill(record: Record, refill: _Refill) -> None:
    for holder in record.live_holders():
        if holder.index in refill.filled:
            holder.tensor, version = refill.filled[holder.index]
            if holder.version != STALE:
                holder.version = version


def refuse_changed_inputs(record: Record) -> None:
    """Refuses a record whose inputs or parameters are not what they were.

    Raises:
        ReplayError: If one was changed in place since forward.
    """
    positions = record.arguments.mutated_positions()
    if positions:
        raise ReplayError(
            f"cannot replay unit {record.name!r}: tensor argument {positions[0]} was changed in "
            "place after its forward. Clone it before the in-place operation, or keep this unit "
            "with a rule whose action is `keep`."
        )
    changed = record.module_state.changed_tensor()
    if changed is not None:
        raise ReplayError(
            f"cannot replay unit {record.name!r}: its {changed} was changed in place between "
            "forward and backward (an optimizer step before backward?). Run backward first, or "
            "keep this unit with a rule whose action is `keep`."
        )

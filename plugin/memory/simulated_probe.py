"""A device memory that exists only as a count: for tests and rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.memory.autocast_of_call import autocast_of_call
from rematic.memory.compiler_import import load_compiler_now
from rematic.memory.list_versions import ListVersions, changed_lists
from rematic.memory.snapshot import MemorySnapshot
from rematic.memory.storages import LiveStorages, storages_of

Op: TypeAlias = Callable[..., object]
# Its output is its input, which was made out of sight of dispatch modes (`torch.tensor`).
_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default})


class SimulatedProbe(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts live storages exactly, and runs out of memory where it is told to.

    While it is entered, the storages that ops return are counted until they are freed, each once:
    views, results of in-place ops and aliases of untracked inputs add nothing. What an op uses for
    itself while it runs is not seen. Tensors that exist before are counted by `track`.

    Failures are `torch.OutOfMemoryError`s. Over the budget, or at a listed allocation, the op has
    run already and its output is dropped before the error is raised; so an op that draws random
    numbers or updates statistics has done so, as have CPU kernels that allocate late, and whoever
    tries again must restore them. At a listed op the error comes before the op runs.

    Modes entered inside it (the retry at the op) see the errors and may run the op again, which
    counts as another op and other allocations.

    Args:
        budget_bytes: Bytes that may be live, None for no limit; may be changed at any time.
        fail_at_ops: Numbers of the ops, from 1, at which to fail, each once.
        fail_at_allocations: Numbers of the new storages, from 1, at which to fail, each once.
    """

    kind = "simulated"

    def __init__(
        self,
        budget_bytes: int | None = None,
        fail_at_ops: Iterable[int] = (),
        fail_at_allocations: Iterable[int] = (),
    ) -> None:
        load_compiler_now()
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"budget_bytes is {budget_bytes}: expected more than 0, or None")
        self.budget_bytes = budget_bytes
        self._failing_ops = _positions(fail_at_ops, "fail_at_ops")
        self._failing_allocations = _positions(fail_at_allocations, "fail_at_allocations")
        self._live = LiveStorages()
        self._lists: dict[Op, tuple[int, ...]] = {}
        self.peak_allocated_bytes = 0
        """Peak of the live bytes since the start or the last `reset_peak`, exact; an allocation
        that failed is not in it."""
        self.num_ops = 0
        """Since start: ops that were begun, failed ones included."""
        self.num_allocations = 0
        """Since start: new storages that were asked for, the failed ones included."""
        self.num_ooms = 0
        """Since start: errors raised."""

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that exist already, such as weights; never fails."""
        for storage in storages_of(tuple(tensors)):
            self._live.note(storage)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self._live.num_bytes)

    def allocated_bytes(self) -> int:
        """Returns the bytes of the live storages, current and exact."""
        return self._live.num_bytes

    def reset_peak(self) -> None:
        """Starts the peak again at what is live now."""
        self.peak_allocated_bytes = self._live.num_bytes

    def snapshot(self) -> MemorySnapshot:
        """Returns everything; nothing is unknown, and there is no fragmentation."""
        return MemorySnapshot(
            allocated_bytes=self._live.num_bytes,
            reserved_bytes=self._live.num_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            capacity_bytes=self.budget_bytes,
            inactive_split_bytes=0,
            num_alloc_retries=0,
            num_ooms=self.num_ooms,
        )

    def __torch_dispatch__(
        self,
        func: Op,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs one op and counts what it returns."""
        kwargs = kwargs or {}
        self.num_ops += 1
        failure = self._failure_before(func)
        if failure is None:
            versions = ListVersions(self._changed_lists(func), args)
            with autocast_of_call(func):
                output = func(*args, **kwargs)
            versions.count()
            failure = self._count(func, (args, kwargs), output)
            if failure is None:
                return output
            del output
        # The traceback of the error keeps this frame: it must not keep tensors alive as well.
        del args, kwargs
        self.num_ooms += 1
        raise torch.OutOfMemoryError(failure)

    def _changed_lists(self, func: Op) -> tuple[int, ...]:
        if func not in self._lists:
            self._lists[func] = changed_lists(func)
        return self._lists[func]

    def _failure_before(self, func: Op) -> str | None:
        if self.num_ops not in self._failing_ops:
            return None
        self._failing_ops.remove(self.num_ops)
        return self._message(f"Failure injected at op {self.num_ops}", func, self._live.num_bytes)

    def _count(self, func: Op, given: object, output: object) -> str | None:
        """Counts what is new in the output; returns the message of a failure, None if it fits."""
        before_bytes, requested_bytes = self._live.num_bytes, 0
        for storage in storages_of(output):
            if not self._live.knows(storage) and _is_alias(func, given, storage):
                continue
            new_bytes = self._live.note(storage)
            if not new_bytes:  # known, or empty: nothing that an allocator would be asked for
                continue
            requested_bytes += new_bytes
            self.num_allocations += 1
            if self.num_allocations in self._failing_allocations:
                self._failing_allocations.remove(self.num_allocations)
                what = f"Failure injected at allocation {self.num_allocations}, tried"
                break
        else:
            if not requested_bytes or not self._over_budget():
                self.peak_allocated_bytes = max(self.peak_allocated_bytes, self._live.num_bytes)
                return None
            what = "Tried"
        return self._message(f"{what} to allocate {requested_bytes} bytes", func, before_bytes)

    def _over_budget(self) -> bool:
        return self.budget_bytes is not None and self._live.num_bytes > self.budget_bytes

    def _message(self, what: str, func: Op, in_use_bytes: int) -> str:
        budget = "no budget" if self.budget_bytes is None else f"a budget of {self.budget_bytes}"
        return (
            f"Simulated device out of memory. {what} in {func}; "
            f"{in_use_bytes} bytes in use of {budget}."
        )


def _is_alias(func: Op, given: object, storage: torch.UntypedStorage) -> bool:
    return func not in _LIFTS and any(known is storage for known in storages_of(given))


def _positions(numbers: Iterable[int], name: str) -> set[int]:
    positions = set(numbers)
    for number in positions:
        if number < 1:
            raise ValueError(f"{name} holds {number}: expected numbers from 1")
    return positions

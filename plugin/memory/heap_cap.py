"""Makes allocations on the CPU fail for real: a limit on the heap of a process of its own."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import TracebackType

import torch

from rematic.byte_sizes import format_bytes
from rematic.memory import glibc

_MIB = 2**20
# glibc grows the heap by what is asked plus a pad, or not at all: this room cannot be filled.
_SLACK_BYTES = 2 * _MIB
_STATUS = Path("/proc/self/status")
_DATA_LINE = "VmData:"


def capped_heap(over_in_use_bytes: int, *, ballast_bytes: int = 16 * _MIB) -> CappedHeap:
    """Returns a context in which this process can take so many bytes more than it has in use.

    Beyond them an allocation fails as it does when memory is full: torch raises a `RuntimeError`
    that names its `DefaultCPUAllocator`. The limit counts all writable private memory, so the
    growth of Python and of libraries counts too, and so do holes between blocks. Meant for child
    processes on Linux with glibc 2.33 or newer: import everything, build model and optimizer and
    call `warm_up_threads()` before; a thread that starts under the cap needs 8 MiB for its stack,
    and OpenMP ends the process if it gets none. Call `use_mapping_malloc()` at the start of the
    process, or up to half of the room ends as holes.

    Args:
        over_in_use_bytes: Bytes that may be allocated on top of those in use on entry.
        ballast_bytes: Bytes held back from everyone; `release_ballast()` makes them available to
            the handler of an error, which cannot even build a message when memory is full.

    Raises:
        ValueError: If the bytes are not above zero, or the ballast is below it.

    Examples:
        with capped_heap(parse_bytes("200MiB")) as cap:
            try:
                train()
            except RuntimeError as error:
                cap.release_ballast()
                report(error)
    """
    if over_in_use_bytes <= 0:
        raise ValueError(
            f"a heap cap of {over_in_use_bytes} bytes over what is in use leaves no room: expected "
            "more than 0. Raise the budget, or use less memory before the cap begins."
        )
    if ballast_bytes < 0:
        raise ValueError(f"ballast_bytes is {ballast_bytes}: expected 0 or more")
    return CappedHeap(over_in_use_bytes, ballast_bytes=ballast_bytes)


class CappedHeap:
    """The context that `capped_heap` returns: a soft `RLIMIT_DATA`, put back on exit.

    The hard limit is left alone, and a soft limit that is lower already stays.
    """

    def __init__(self, over_in_use_bytes: int, *, ballast_bytes: int) -> None:
        self.over_in_use_bytes = over_in_use_bytes
        """Bytes that may be allocated on top of those in use on entry."""
        self.ballast_bytes = ballast_bytes
        """Bytes that `release_ballast` adds to them."""
        self.limit_bytes: int | None = None
        """The soft limit that was set, None before entry and after exit."""

    def __enter__(self) -> CappedHeap:
        """Sets the limit.

        Raises:
            RuntimeError: If this platform has no such limit, or the process may not set it.
        """
        if self.limit_bytes is not None:
            raise RuntimeError("this heap cap is in force already: expected one `with` per cap")
        heap = glibc.read_heap()
        if not sys.platform.startswith("linux") or heap is None:
            raise RuntimeError(
                f"cannot cap the heap of this process: expected Linux with glibc 2.33 or newer as "
                f"its allocator, this is {sys.platform}. Run without the cap."
            )
        _warn_of_holes(heap.free_bytes, self.over_in_use_bytes)
        import resource

        self._set_limit = resource.setrlimit
        self._which = resource.RLIMIT_DATA
        self._former = resource.getrlimit(self._which)
        soft, hard = self._former
        limit = _data_bytes() - heap.free_bytes + self.over_in_use_bytes + _SLACK_BYTES
        limit = min(limit, soft) if soft != resource.RLIM_INFINITY else limit
        released = limit + self.ballast_bytes
        if hard != resource.RLIM_INFINITY and released > hard:
            raise RuntimeError(
                f"cannot cap the heap at {format_bytes(limit)} with {self.ballast_bytes} bytes of "
                f"ballast: the hard limit RLIMIT_DATA of this process is {format_bytes(hard)}. "
                "Lower the cap or the ballast."
            )
        # Built now, since there may be no memory for a tuple when they are needed.
        self._held, self._released = (limit, hard), (released, hard)
        self._set_limit(self._which, self._held)
        self.limit_bytes = limit
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Puts the former soft limit back."""
        self._set_limit(self._which, self._former)
        self.limit_bytes = None

    def release_ballast(self) -> None:
        """Makes the ballast available; call it first in the handler of an out-of-memory error."""
        if self.limit_bytes is not None:
            self._set_limit(self._which, self._released)

    def hold_ballast(self) -> None:
        """Holds the ballast back again, for a process that goes on after its handler."""
        if self.limit_bytes is not None:
            self._set_limit(self._which, self._held)


def warm_up_threads() -> None:
    """Starts the threads that torch computes with, while they can still get their stacks.

    OpenMP keeps a pool per calling thread: call it in the thread that trains, and after
    `torch.set_num_threads`.
    """
    num_threads = torch.get_num_threads()
    # One chunk of 32,768 elements is the least that torch gives a thread of its own.
    torch.ones(num_threads * 2**16).exp_()
    weight = torch.ones(512, 512, requires_grad=True)
    torch.autograd.backward((weight @ weight).sum())


def _warn_of_holes(free_bytes: int, room_bytes: int) -> None:
    if free_bytes > room_bytes:
        warnings.warn(
            f"the heap cap of {format_bytes(room_bytes)} over what is in use cannot hold: the "
            f"allocator has {format_bytes(free_bytes)} in holes that may be filled. Call "
            "use_mapping_malloc() when the process starts, which leaves no holes.",
            stacklevel=3,
        )


def _data_bytes() -> int:
    for line in _STATUS.read_text("ascii").splitlines():
        if line.startswith(_DATA_LINE):
            return int(line.removeprefix(_DATA_LINE).split()[0]) * 1024
    raise RuntimeError(f"cannot cap the heap of this process: {_STATUS} has no line {_DATA_LINE!r}")

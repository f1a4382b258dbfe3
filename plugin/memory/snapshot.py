"""What a probe reports, and what the rest of rematic asks of a probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """Memory at one moment; None in a field means that it is not known.

    All bytes of one snapshot count the same memory, so they may be compared and subtracted.
    """

    allocated_bytes: int | None = None
    """Current: bytes in use by tensors."""
    reserved_bytes: int | None = None
    """Current: bytes that the allocator holds from the system, free blocks included."""
    peak_allocated_bytes: int | None = None
    """Peak of `allocated_bytes`; since when, and how exact, is said by the probe's class."""
    capacity_bytes: int | None = None
    """Current: the most that `allocated_bytes` could reach, with what others hold taken off."""
    inactive_split_bytes: int | None = None
    """Current: free bytes in holes between blocks in use, the measure of fragmentation."""
    num_alloc_retries: int | None = None
    """Since start: allocations that succeeded only after cached blocks had been released."""
    num_ooms: int | None = None
    """Since start: out-of-memory errors raised by the allocator."""


@runtime_checkable
class Probe(Protocol):
    """Reads one kind of memory, and changes nothing: no counter is ever reset for others."""

    @property
    def kind(self) -> str:
        """`host`, `cuda`, `accelerator` or `simulated`."""
        ...

    def allocated_bytes(self) -> int | None:
        """Returns the bytes in use now; cheap, since it is read at every unit end."""
        ...

    def snapshot(self) -> MemorySnapshot:
        """Returns everything that can be known now."""
        ...

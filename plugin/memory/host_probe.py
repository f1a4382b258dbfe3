"""The probe of host memory: makes a CPU a device like any other."""

from __future__ import annotations

from collections.abc import Callable

from rematic.memory import glibc
from rematic.memory.host_limits import HostFiles, data_limit_bytes
from rematic.memory.snapshot import MemorySnapshot


class HostProbe:
    """Reads the heap of this process.

    `allocated_bytes` is current: what the heap has handed out and not got back, less
    `overhead_bytes`, so that with `process_overhead_bytes` it counts the tensors of the training
    and not the interpreter. `peak_allocated_bytes` is a *sampled* peak: the highest value that
    this probe has been asked for since it was made. `reserved_bytes` is what the allocator holds
    from the system, less the overhead; `inactive_split_bytes` are its holes. Retries and errors of
    the allocator are not known on a host.

    `capacity_bytes` is the one given, else the smallest of the limits of the control group, of
    `RLIMIT_DATA` and of the physical memory, less what the process holds beside the heap and less
    the overhead: what `allocated_bytes` could reach. Group and physical memory are read when the
    probe is made, the rest at every snapshot.

    Where glibc 2.33 or newer does not manage the heap, resident memory stands for the bytes in
    use; it stays high after memory is freed. `notes` says what is not known.

    Args:
        capacity_bytes: Bytes that training may use, None to look for limits.
        overhead_bytes: Bytes that are in use but are no concern of the training.
        files: Where the kernel tells about memory.
    """

    kind = "host"

    def __init__(
        self,
        capacity_bytes: int | None = None,
        overhead_bytes: int = 0,
        *,
        files: HostFiles | None = None,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}: expected more than 0, or None")
        if overhead_bytes < 0:
            raise ValueError(f"overhead_bytes is {overhead_bytes}: expected 0 or more")
        self.overhead_bytes = overhead_bytes
        """Bytes in use that are taken off."""
        self._capacity_bytes = capacity_bytes
        self._files = files or HostFiles()
        self._in_use, self.notes = _reader(self._files)
        self._peak_bytes: int | None = None
        self._group_bytes = self._files.cgroup_bytes()
        self._physical_bytes = self._files.physical_bytes()

    def allocated_bytes(self) -> int | None:
        """Returns the bytes in use now; 6 to 25 us in a process that trains."""
        return self._noted(self._in_use())

    def resident_bytes(self) -> int | None:
        """Returns the bytes of the whole process in physical memory, nothing taken off."""
        return self._files.resident_bytes() or _psutil_resident_bytes()

    def snapshot(self) -> MemorySnapshot:
        """Returns everything that can be known now; about 0.1 ms in a process that trains."""
        heap = glibc.read_heap()
        allocated = self._noted(self._in_use() if heap is None else heap.in_use_bytes)
        return MemorySnapshot(
            allocated_bytes=allocated,
            reserved_bytes=max(0, heap.held_bytes - self.overhead_bytes) if heap else None,
            peak_allocated_bytes=self._peak_bytes,
            capacity_bytes=self._capacity_bytes or self._found_capacity_bytes(heap),
            inactive_split_bytes=heap.free_bytes - heap.top_bytes if heap else None,
        )

    def _noted(self, in_use: int | None) -> int | None:
        """Returns the bytes in use without the overhead, and remembers the highest."""
        if in_use is None:
            return None
        allocated = max(0, in_use - self.overhead_bytes)
        if self._peak_bytes is None or allocated > self._peak_bytes:
            self._peak_bytes = allocated
        return allocated

    def _found_capacity_bytes(self, heap: glibc.HeapStatistics | None) -> int | None:
        resident, data = self._files.process_bytes()
        resident, data = resident or _psutil_resident_bytes() or 0, data or 0
        # What counts against a limit beside the blocks that the heap has handed out.
        beside_resident = max(0, resident - heap.held_bytes) if heap else 0
        beside_data = max(0, data - heap.held_bytes) if heap else 0
        limits = (
            (self._group_bytes, beside_resident),
            (self._physical_bytes, beside_resident),
            (data_limit_bytes(), beside_data),
        )
        found = [limit - beside for limit, beside in limits if limit is not None]
        return max(0, min(found) - self.overhead_bytes) if found else None


def process_overhead_bytes(tensors_bytes: int, *, files: HostFiles | None = None) -> int:
    """Returns what is in use now beside the tensors of the training: interpreter, libraries, data.

    Args:
        tensors_bytes: Bytes of the training's tensors that exist now: weights, buffers, gradients,
            optimizer state.
        files: Where the kernel tells about memory.
    """
    if tensors_bytes < 0:
        raise ValueError(f"tensors_bytes is {tensors_bytes}: expected 0 or more")
    in_use = _reader(files or HostFiles())[0]()
    return 0 if in_use is None else max(0, in_use - tensors_bytes)


def _reader(files: HostFiles) -> tuple[Callable[[], int | None], tuple[str, ...]]:
    heap_reader = glibc.make_in_use_reader()
    if heap_reader is not None:
        return heap_reader, ()
    known_resident = files.resident_bytes if files.resident_bytes() else _psutil_resident_bytes
    if known_resident() is None:
        return known_resident, (
            "bytes in use are not known: the heap is not managed by glibc 2.33 or newer, and "
            "psutil is not installed",
        )
    return known_resident, (
        "bytes in use are those resident, which stay high after memory is freed, since the heap is "
        "not managed by glibc 2.33 or newer",
        "reserved bytes and fragmentation are not known",
    )


def _psutil_resident_bytes() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.Process().memory_info().rss)

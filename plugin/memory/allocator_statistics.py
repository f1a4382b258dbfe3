"""Turns the statistics of torch's caching allocators into a snapshot."""

from __future__ import annotations

from collections.abc import Mapping

from rematic.memory.snapshot import MemorySnapshot

_ALLOCATED = "allocated_bytes.all.current"
_RESERVED = "reserved_bytes.all.current"
_PEAK_ALLOCATED = "allocated_bytes.all.peak"
_INACTIVE_SPLIT = "inactive_split_bytes.all.current"
_NUM_ALLOC_RETRIES = "num_alloc_retries"
_NUM_OOMS = "num_ooms"
_SIGN_OF_LIFE = (_ALLOCATED, _RESERVED, _PEAK_ALLOCATED)


def snapshot_of_statistics(
    statistics: Mapping[str, object],
    *,
    memory_info: tuple[int, int] | None,
    fraction: float | None = None,
    counts_splits: bool = True,
) -> MemorySnapshot:
    """Returns the snapshot that the statistics allow.

    Some backends report nothing, or zeros throughout, although tensors exist: that is unknown and
    not empty. So is everything before the first allocation.

    Args:
        statistics: What `memory_stats` returned: flat names and numbers.
        memory_info: Free and total bytes of the device, None if not known.
        fraction: Share of the device that this process may take, None for all of it.
        counts_splits: Whether the allocator counts holes; some report zero instead.
    """
    if not any(_number(statistics, name) for name in _SIGN_OF_LIFE):
        statistics = {}
    reserved = _number(statistics, _RESERVED)
    return MemorySnapshot(
        allocated_bytes=_number(statistics, _ALLOCATED),
        reserved_bytes=reserved,
        peak_allocated_bytes=_number(statistics, _PEAK_ALLOCATED),
        capacity_bytes=_capacity_bytes(memory_info, reserved, fraction),
        inactive_split_bytes=_number(statistics, _INACTIVE_SPLIT) if counts_splits else None,
        num_alloc_retries=_number(statistics, _NUM_ALLOC_RETRIES),
        num_ooms=_number(statistics, _NUM_OOMS),
    )


def _number(statistics: Mapping[str, object], name: str) -> int | None:
    value = statistics.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _capacity_bytes(
    memory_info: tuple[int, int] | None, reserved_bytes: int | None, fraction: float | None
) -> int | None:
    if memory_info is None:
        return None
    free_bytes, total_bytes = memory_info
    if total_bytes <= 0:
        return None
    capacity = total_bytes
    if reserved_bytes is not None and free_bytes >= 0:
        capacity = min(capacity, free_bytes + reserved_bytes)  # less what others hold
    if fraction is not None and 0 < fraction < 1:
        capacity = min(capacity, int(fraction * total_bytes))
    return capacity

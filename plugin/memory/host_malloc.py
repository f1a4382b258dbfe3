"""Two ways to run the heap of a process that trains on the CPU."""

from __future__ import annotations

from rematic.memory import glibc

_MIB = 2**20
# Growth in small pieces costs a system call each, but with a large pad as much room stays unused
# under a heap cap, because glibc asks for the pad or gives up (measured: 16 of 200 MiB at 16 MiB).
_TOP_PAD_BYTES = 1 * _MIB
# Blocks below it share the heap, where what outlives a step pins holes between them. Compressed
# activations of a short document are just below 256 KiB: with that, 14 steps of lengths 204 to
# 1,024 left 13 MiB in holes, with this 2 (32 MiB and 12 blocks of tiny-cpu: out of memory).
_MAPPING_THRESHOLD_BYTES = 64 * 2**10
_EVERYTHING_BYTES = 2**31 - 1
_MANY = 2**20


def use_caching_malloc() -> bool:
    """Lets glibc keep freed memory for reuse, as a caching allocator does.

    Step times are then those of the arithmetic and not of page faults. Not for a heap cap: all
    blocks share one heap, and glibc asks for room to align each, so that a tensor often does not
    fit into the hole that an equal one left. A step that has 91 MiB in use at its peak fails under
    a cap of 150 with 113 MiB in holes. Sets parameters for the rest of the process; call it before
    torch allocates. Safe to call twice.

    Returns:
        Whether it could; False where glibc 2.33 or newer does not manage the heap.
    """
    return glibc.set_parameters(
        glibc.mmap_max(0),
        glibc.trim_threshold(_EVERYTHING_BYTES),
        glibc.top_pad(_TOP_PAD_BYTES),
        glibc.arena_max(1),
    )


def use_mapping_malloc() -> bool:
    """Gives every block from 64 KiB up a mapping of its own, returned as soon as it is freed.

    For a heap cap: there are no holes but those between small blocks, and the same step fits into
    100 MiB. Steps take 35 to 45 % longer, whatever the policy, since every new tensor faults its
    pages in. Sets parameters for the rest of the process; call it before torch allocates, in place
    of `use_caching_malloc`. Safe to call twice.

    Returns:
        Whether it could; False where glibc 2.33 or newer does not manage the heap.
    """
    return glibc.set_parameters(
        glibc.mmap_max(_MANY),
        glibc.mmap_threshold(_MAPPING_THRESHOLD_BYTES),
        glibc.trim_threshold(_EVERYTHING_BYTES),
        glibc.top_pad(_TOP_PAD_BYTES),
        glibc.arena_max(1),
    )

"""Gives cached blocks of an allocator back to the device."""

from __future__ import annotations

import torch

from rematic.memory.snapshot import Probe

RELEASING_KINDS = ("cuda", "accelerator")
"""Kinds of probes whose allocators hold blocks that can be given back."""


def release_cached_blocks(probe: Probe) -> int | None:
    """Releases the free blocks that the allocator of a probe's device holds.

    Only torch's caching allocators hold any that can be given back; the heap of a CPU is left
    alone, since its pages would only be faulted in again.

    Args:
        probe: Tells which memory, and how much it gave.

    Returns:
        The bytes given back; None if that cannot be told, 0 where nothing is done.
    """
    if probe.kind not in RELEASING_KINDS:
        return 0
    before = probe.snapshot().reserved_bytes
    if probe.kind == "cuda":
        torch.cuda.empty_cache()
    else:
        torch.accelerator.empty_cache()
    after = probe.snapshot().reserved_bytes
    return None if before is None or after is None else max(0, before - after)

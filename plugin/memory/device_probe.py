"""The probes of devices with a caching allocator of torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rematic.memory.allocator_statistics import snapshot_of_statistics
from rematic.memory.snapshot import MemorySnapshot

_Value = TypeVar("_Value")
# What torch's readers raise without a device, without a driver, or in a build without the backend.
_UNREADABLE = (RuntimeError, AssertionError, AttributeError, NotImplementedError, KeyError)
_SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class CudaProbe:
    """Reads the caching allocator of one CUDA or HIP device, as torch counts it.

    All bytes but the peak are current. The peak is exact and counts from the start of the process,
    or from the last reset that anyone made (`torch.cuda.reset_peak_memory_stats`): this probe
    resets nothing, since others read the same counters. Retries and errors count from the start,
    or their last reset. `capacity_bytes` is what the device has, less what other processes hold
    now, and at most this process's memory fraction.

    Statistics that are missing, zero throughout or unreadable are unknown, and warned of once.

    Args:
        device: The device.
        stats: Returns what `torch.cuda.memory_stats` does; others than torch's own in tests.
        mem_get_info: Returns free and total bytes of the device.
        fraction: Returns the share of the device that this process may take.
    """

    kind = "cuda"

    def __init__(
        self,
        device: torch.device | str,
        stats: Callable[[], Mapping[str, object]] | None = None,
        *,
        mem_get_info: Callable[[], tuple[int, int]] | None = None,
        fraction: Callable[[], float] | None = None,
    ) -> None:
        self.device = torch.device(device)
        """The device that is read."""
        if self.device.type != "cuda":
            raise ValueError(f"CudaProbe reads CUDA devices, not {self.device}: use another probe")
        # The nested form is one call into torch; flattening it takes several times as long.
        self._current = _current_of(stats) if stats else self._torch_current
        self._stats = stats or (lambda: torch.cuda.memory_stats(self.device))
        self._mem_get_info = mem_get_info or (lambda: torch.cuda.mem_get_info(self.device))
        self._fraction = fraction or (
            lambda: torch.cuda.get_per_process_memory_fraction(self.device)
        )
        settings = allocator_settings()
        self.expandable_segments = settings.get("expandable_segments", "").lower() == "true"
        """Whether segments grow, so that holes are rare; as set in the environment."""
        self._counts_splits = settings.get("backend", "native") == "native"
        self._warn = _WarnOnce(f"memory statistics of {self.device}")

    def allocated_bytes(self) -> int | None:
        """Returns the bytes of live tensors now, None if not known."""
        return self._warn.reading(self._current)

    def snapshot(self) -> MemorySnapshot:
        """Returns everything that can be known now."""
        return self._warn.checked(
            snapshot_of_statistics(
                self._warn.reading(self._stats) or {},
                memory_info=self._warn.reading(self._mem_get_info),
                fraction=_quietly(self._fraction),  # absent before torch 2.8
                counts_splits=self._counts_splits,
            )
        )

    def _torch_current(self) -> int | None:
        # An untyped dictionary of dictionaries; empty before the device is used.
        nested: Any = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(nested["allocated_bytes"]["all"]["current"]) or None


class AcceleratorProbe:
    """Reads any other accelerator, as far as `torch.accelerator` has statistics for it.

    What its numbers count is said by `CudaProbe`; there is no memory fraction.

    Args:
        device: The device.
        stats: Returns what `torch.accelerator.memory_stats` does; others than torch's own in tests.
        mem_get_info: Returns free and total bytes of the device.
    """

    kind = "accelerator"

    def __init__(
        self,
        device: torch.device | str,
        stats: Callable[[], Mapping[str, object]] | None = None,
        *,
        mem_get_info: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.device = torch.device(device)
        """The device that is read."""
        self._stats = stats or (lambda: torch.accelerator.memory_stats(self.device))
        self._mem_get_info = mem_get_info or (
            lambda: torch.accelerator.get_memory_info(self.device)
        )
        self._warn = _WarnOnce(f"memory statistics of {self.device}")

    def allocated_bytes(self) -> int | None:
        """Returns the bytes of live tensors now, None if not known."""
        return self._warn.reading(_current_of(self._stats))

    def snapshot(self) -> MemorySnapshot:
        """Returns everything that can be known now."""
        return self._warn.checked(
            snapshot_of_statistics(
                self._warn.reading(self._stats) or {},
                memory_info=self._warn.reading(self._mem_get_info),
            )
        )


def allocator_settings() -> dict[str, str]:
    """Returns the settings of torch's caching allocators in the environment, by name."""
    for variable in _SETTINGS_VARIABLES:
        text = os.environ.get(variable)
        if text is not None:
            pairs = (part.partition(":") for part in text.split(","))
            return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}
    return {}


def _current_of(stats: Callable[[], Mapping[str, object]]) -> Callable[[], int | None]:
    return lambda: snapshot_of_statistics(stats(), memory_info=None).allocated_bytes


def _quietly(read: Callable[[], _Value]) -> _Value | None:
    try:
        return read()
    except _UNREADABLE:
        return None


class _WarnOnce:
    """Says once that something could not be read."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = False

    def reading(self, read: Callable[[], _Value]) -> _Value | None:
        """Returns what `read` returns, None if it fails."""
        try:
            return read()
        except _UNREADABLE as error:
            self._say(f"{type(error).__name__}: {error}")
            return None

    def checked(self, snapshot: MemorySnapshot) -> MemorySnapshot:
        """Returns the snapshot; says what is not known in it."""
        if snapshot.allocated_bytes is None or snapshot.capacity_bytes is None:
            self._say("they are missing, or zero throughout")
        return snapshot

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self._what} cannot be read ({why}): memory counts as unknown, so rematic acts "
                "on out-of-memory errors only, not ahead of them.",
                stacklevel=4,
            )

"""Tells out-of-memory errors of tensor memory from all other errors, by a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """One kind of error: a type or a wording, and what it means."""

    id: str
    """Name of the row, for the journal and the tests."""
    out_of_memory: bool
    """Whether freeing tensors can answer it."""
    types: tuple[type[BaseException], ...] = (RuntimeError,)
    """Types it comes as; subclasses count."""
    pattern: re.Pattern[str] | None = None
    """Found in its text; None for any text."""

    def matches(self, error: BaseException) -> bool:
        """Returns whether the error is of this kind."""
        if not isinstance(error, self.types):
            return False
        return self.pattern is None or self.pattern.search(str(error)) is not None


def _row(row_id: str, pattern: str, *, out_of_memory: bool = True) -> ErrorRow:
    compiled = re.compile(pattern, re.IGNORECASE)
    return ErrorRow(id=row_id, out_of_memory=out_of_memory, pattern=compiled)


_DISTRIBUTED: tuple[type[BaseException], ...] = (
    (torch.distributed.DistError,) if torch.distributed.is_available() else ()
)

ERROR_TABLE: tuple[ErrorRow, ...] = (
    # What freeing tensors cannot answer. First, since their texts may quote an allocation failure.
    ErrorRow(id="host-memory-error", out_of_memory=False, types=(MemoryError,)),
    ErrorRow(id="replay", out_of_memory=False, types=(CheckpointError,)),
    ErrorRow(id="distributed", out_of_memory=False, types=_DISTRIBUTED),
    _row("collective", r"\b(NCCL|RCCL|HCCL|XCCL|gloo|ProcessGroup)", out_of_memory=False),
    _row("illegal-access", r"illegal memory access|misaligned address", out_of_memory=False),
    _row("data-worker", r"DataLoader worker", out_of_memory=False),
    _row("shared-memory", r"shared memory", out_of_memory=False),  # of a block, or /dev/shm
    # What it can.
    ErrorRow(id="torch", out_of_memory=True, types=(torch.OutOfMemoryError,)),
    _row("device", r"\b(CUDA|HIP|XPU|NPU|HPU|MUSA|MLU|SDAA|GCU) out of memory"),
    _row("mps", r"MPS backend out of memory|Invalid buffer size: "),
    _row("runtime-call", r"\b(CUDA|HIP|NPU|MUSA) error: out of memory"),
    _row("legacy-call", r"\b(cuda|hip) runtime error \(2\) ?: out of memory"),
    _row("error-name", r"\b(cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b"),
    _row("level-zero", r"\b(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b"),
    _row("ascend", r"\bEL0004\b.*allocate memory|aclrtMalloc\w* failed"),
    _row("gaudi", r"PT_DEVMEM Allocation failed|synStatus.*\bDevice not enough memory"),
    _row("blas", r"\b(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|HIPSPARSE)_STATUS_ALLOC_FAILED\b"),
    # The handle wants a workspace of its own; with a full device its creation fails like this.
    _row("blas-handle", r"\bCUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"),
    _row("rocblas", r"\brocblas_status_memory_error\b"),
    _row("cudnn", r"\bCUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_\w*ALLOCATION_FAILED)\b"),
    _row("miopen", r"\bmiopenStatusAllocFailed\b|MIOpen.*Memory not available to allocate buffer"),
    _row("fft", r"\b(CUFFT|HIPFFT)_ALLOC_FAILED\b"),
    _row("cpu", r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"),
    # An op's small C++ allocation out of the heap that CPU tensors fill.
    _row("cpu-small", r"\Astd::bad_alloc\Z"),
    # The final error of rematic and of others, worded so that callers who shrink batches know it.
    _row("final", r" out of memory\."),
)
"""The first row that matches decides; an error that matches none is judged by its cause."""


def classify_error(error: BaseException) -> ErrorRow | None:
    """Returns the row that decides about an error, None if none does.

    An error raised `from` another counts as that other one, unless a row matches it itself. What
    merely happened while another error was handled says nothing about it.
    """
    for link in _causes(error):
        for row in ERROR_TABLE:
            if row.matches(link):
                return row
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether tensor memory ran out, so that freeing tensors and trying again may help."""
    row = classify_error(error)
    return row is not None and row.out_of_memory


_REQUEST = re.compile(
    r"tried to allocate (?P<number>[0-9.]+) ?(?P<unit>(?:[KMGT]i?)?B|bytes)\b", re.IGNORECASE
)
_POWER_OF_UNIT = {"b": 0, "bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4}


def requested_bytes(error: BaseException) -> int:
    """Returns the bytes whose allocation failed, by the error's text; 1 where it does not say.

    A rounded figure (`1.95 GiB`) is read as the most that rounds to it, so that freeing as much is
    enough. MPS writes binary sizes with decimal units.
    """
    for link in _causes(error):
        match = _REQUEST.search(str(link))
        if match is not None:
            return max(1, _size(match["number"].rstrip("."), match["unit"].lower()))
    return 1


def _size(number: str, unit: str) -> int:
    power = _POWER_OF_UNIT[unit if unit in _POWER_OF_UNIT else f"{unit[0]}ib"]
    decimals = len(number.partition(".")[2])
    rounded_off = 0.5 * 0.1**decimals if power else 0.0
    return math.ceil((float(number) + rounded_off) * float(1 << 10 * power))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__

"""F8: which errors mean that tensor memory ran out, and how much was asked for."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from rematic.memory import classify_error, is_out_of_memory, requested_bytes
from rematic.memory.out_of_memory import ERROR_TABLE

MIB = 2**20
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.80 GiB memory in "
    "use. Of the allocated memory 70.00 GiB is allocated by PyTorch."
)
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1536000 bytes. Error code 12 (Cannot allocate memory)"
)

MEANS_OUT_OF_MEMORY = [
    ("torch", torch.OutOfMemoryError(CUDA_TEXT)),
    ("torch", torch.OutOfMemoryError("any text at all")),
    ("torch", torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")),
    ("torch", torch.OutOfMemoryError("Caught OutOfMemoryError in replica 0 on device 0.")),
    ("device", RuntimeError(CUDA_TEXT)),
    ("device", RuntimeError("HIP out of memory. Tried to allocate 64.00 MiB (GPU 0; 15.98 GiB)")),
    ("device", RuntimeError("XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total")),
    ("device", RuntimeError("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB)")),
    ("device", RuntimeError("HPU out of memory. Tried to allocate 1.00 GiB")),
    ("mps", RuntimeError("MPS backend out of memory (MPS allocated: 9.57 GiB, other: 17 GiB)")),
    ("mps", RuntimeError("Invalid buffer size: 24.00 GiB")),
    ("runtime-call", RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")),
    ("runtime-call", torch.AcceleratorError("CUDA error: out of memory")),
    ("runtime-call", RuntimeError("HIP error: out of memory")),
    ("legacy-call", RuntimeError("cuda runtime error (2) : out of memory at THCStorage.cu:58")),
    ("error-name", RuntimeError("hipErrorOutOfMemory: returned by hipMalloc")),
    ("level-zero", RuntimeError("Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)")),
    ("level-zero", RuntimeError("UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)")),
    ("level-zero", RuntimeError("Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)")),
    ("ascend", RuntimeError("Memory_Allocation_Failure(EL0004): Failed to allocate memory.")),
    ("gaudi", RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::64")),
    ("blas", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm`")),
    ("blas", RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate`")),
    ("blas", RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED")),
    (
        "blas-handle",
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
    ),
    ("rocblas", RuntimeError("rocblas_status_memory_error")),
    ("cudnn", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    (
        "cudnn",
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ),
    ("miopen", RuntimeError("MIOpen Error: Memory not available to allocate buffer: 655360000")),
    ("fft", RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED")),
    ("cpu", RuntimeError(CPU_TEXT)),
    ("cpu", RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")),
    ("cpu-small", RuntimeError("std::bad_alloc")),
    ("final", RuntimeError("3 policies were tried and the step runs out of memory. 4 GiB more")),
]

MEANS_SOMETHING_ELSE = [
    ("host-memory-error", MemoryError()),
    ("host-memory-error", MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ("replay", CheckpointError("torch.utils.checkpoint: A different number of tensors was saved")),
    ("replay", CheckpointError("CUDA out of memory.")),
    (
        "distributed",
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error. "
            "Last error: Failed to CUDA calloc async: out of memory."
        ),
    ),
    ("collective", RuntimeError("NCCL communicator was aborted: CUDA out of memory.")),
    ("collective", RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")),
    ("collective", RuntimeError("ProcessGroupGloo: 8 GiB out of memory.")),
    ("illegal-access", RuntimeError("CUDA error: an illegal memory access was encountered")),
    ("illegal-access", torch.AcceleratorError("CUDA error: misaligned address")),
    (
        "data-worker",
        RuntimeError(f"Caught RuntimeError in DataLoader worker process 0. {CPU_TEXT}"),
    ),
    ("shared-memory", RuntimeError("unable to open shared memory object: out of memory.")),
]

MEANS_NOTHING_KNOWN = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    # As often a wrong stride or dtype as a missing workspace: a retry would end in a wrong report.
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("a std::bad_alloc was mentioned"),
    RuntimeError(),
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    OSError("DefaultCPUAllocator: can't allocate memory"),
    KeyboardInterrupt(),
]


def label(value: object) -> str | None:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {str(value)[:40]}"
    return None


@pytest.mark.parametrize(("row", "error"), MEANS_OUT_OF_MEMORY, ids=label)
def test_f8_these_are_out_of_memory(row: str, error: BaseException) -> None:
    assert is_out_of_memory(error)
    found = classify_error(error)
    assert found is not None
    assert found.id == row


@pytest.mark.parametrize(("row", "error"), MEANS_SOMETHING_ELSE, ids=label)
def test_f8_these_are_known_to_be_something_else(row: str, error: BaseException) -> None:
    assert not is_out_of_memory(error)
    found = classify_error(error)
    assert found is not None
    assert found.id == row


@pytest.mark.parametrize("error", MEANS_NOTHING_KNOWN, ids=label)
def test_f8_no_row_decides_about_these(error: BaseException) -> None:
    assert classify_error(error) is None
    assert not is_out_of_memory(error)


def test_every_row_of_the_table_is_shown_to_decide() -> None:
    shown = {row for row, _ in MEANS_OUT_OF_MEMORY + MEANS_SOMETHING_ELSE}
    assert shown == {row.id for row in ERROR_TABLE}
    assert len(ERROR_TABLE) == len(shown)


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_f8_an_error_raised_from_one_counts_as_it() -> None:
    inner = raised_from(RuntimeError("unit 3 failed"), torch.OutOfMemoryError(CUDA_TEXT))
    assert is_out_of_memory(raised_from(ValueError("step 7 failed"), inner))


def test_a_known_other_error_is_not_judged_by_its_cause() -> None:
    error = CheckpointError("different metadata")
    assert not is_out_of_memory(raised_from(error, torch.OutOfMemoryError(CUDA_TEXT)))
    error_of_host = raised_from(RuntimeError("unit 3 failed"), MemoryError())
    assert not is_out_of_memory(error_of_host)


def test_what_happens_while_one_is_handled_is_no_such_error() -> None:
    error = RuntimeError("a different fault in the handler")
    error.__context__ = torch.OutOfMemoryError(CUDA_TEXT)
    assert not is_out_of_memory(error)


def test_a_circle_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    assert requested_bytes(first) == 1


def test_the_real_error_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 2**58


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA_TEXT, 2 * 2**30 + 5368710),  # half a hundredth of a GiB, rounded up
        (CPU_TEXT, 1536000),
        ("XPU out of memory. Tried to allocate 512.00 MiB.", 512 * MIB + 5243),
        ("Tried to allocate 20 MiB (GPU 0", 20 * MIB + MIB // 2),
        ("Tried to allocate 256 bytes on shared pool.", 256),
        ("Tried to allocate 512 B.", 512),
        ("(MPS allocated: 6 GB). Tried to allocate 459.07 MB on private pool", 481375028),
        ("Tried to allocate more than there is", 1),
        ("std::bad_alloc", 1),
        ("", 1),
    ],
)
def test_the_bytes_wanted_are_read_from_the_text(text: str, expected: int) -> None:
    assert requested_bytes(RuntimeError(text)) == expected


def test_the_bytes_wanted_are_read_from_the_cause() -> None:
    error = raised_from(RuntimeError("unit 3 failed"), RuntimeError(CPU_TEXT))
    assert requested_bytes(error) == 1536000


def test_what_rounds_to_the_figure_in_the_text_is_covered() -> None:
    size_bytes = int(1.954999 * 2**30)
    text = f"CUDA out of memory. Tried to allocate {size_bytes / 2**30:.2f} GiB."
    assert requested_bytes(RuntimeError(text)) >= size_bytes

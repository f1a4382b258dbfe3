"""F14: the probes of accelerators, on recorded statistics; what is missing is unknown."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from rematic.memory import AcceleratorProbe, CudaProbe, MemorySnapshot, Probe
from rematic.memory.device_probe import allocator_settings

GIB = 2**30

# The names that matter of a training step, as torch 2.13 reports them.
FEED: dict[str, object] = {
    "active_bytes.all.current": 6 * GIB,
    "allocated_bytes.all.current": 5 * GIB,
    "allocated_bytes.all.peak": 9 * GIB,
    "inactive_split_bytes.all.current": GIB // 2,
    "num_alloc_retries": 2,
    "num_ooms": 1,
    "num_sync_all_streams": 2,
    "reserved_bytes.all.current": 10 * GIB,
    "reserved_bytes.all.peak": 11 * GIB,
}
ZEROS: dict[str, object] = dict.fromkeys(FEED, 0)
FREE, TOTAL = 60 * GIB, 80 * GIB
PROBES = [
    pytest.param(lambda stats, info: cuda(stats, info), id="cuda"),
    pytest.param(
        lambda stats, info: AcceleratorProbe("xpu:0", stats, mem_get_info=info), id="accelerator"
    ),
]
Make = Callable[[Callable[[], Mapping[str, object]], Callable[[], tuple[int, int]]], Probe]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def cuda(
    stats: Callable[[], Mapping[str, object]],
    info: Callable[[], tuple[int, int]] = lambda: (FREE, TOTAL),
    fraction: float = 1.0,
) -> CudaProbe:
    return CudaProbe("cuda:0", stats, mem_get_info=info, fraction=lambda: fraction)


@pytest.mark.parametrize("make", PROBES)
def test_a_recorded_feed_is_read_in_full(make: Make) -> None:
    probe = make(lambda: FEED, lambda: (FREE, TOTAL))
    assert isinstance(probe, Probe)
    assert probe.allocated_bytes() == 5 * GIB
    assert probe.snapshot() == MemorySnapshot(
        allocated_bytes=5 * GIB,
        reserved_bytes=10 * GIB,
        peak_allocated_bytes=9 * GIB,
        capacity_bytes=70 * GIB,  # others hold 10 GiB
        inactive_split_bytes=GIB // 2,
        num_alloc_retries=2,
        num_ooms=1,
    )


@pytest.mark.parametrize("make", PROBES)
@pytest.mark.parametrize(
    ("stats", "unknown"),
    [
        pytest.param({}, set(vars(MemorySnapshot())) - {"capacity_bytes"}, id="empty"),
        pytest.param(ZEROS, set(vars(MemorySnapshot())) - {"capacity_bytes"}, id="zeros"),
        pytest.param(
            {k: v for k, v in FEED.items() if k != "num_alloc_retries"},
            {"num_alloc_retries"},
            id="one-missing",
        ),
        pytest.param(
            {k: v for k, v in FEED.items() if "reserved" not in k and "inactive" not in k},
            {"reserved_bytes", "inactive_split_bytes"},
            id="reserved-missing",
        ),
        pytest.param(
            {
                **FEED,
                "num_ooms": "3",
                "num_alloc_retries": -1,
                "inactive_split_bytes.all.current": None,
            },
            {"num_ooms", "num_alloc_retries", "inactive_split_bytes"},
            id="nonsense",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:memory statistics of")
def test_f14_what_is_missing_is_unknown_and_nothing_fails(
    make: Make, stats: dict[str, object], unknown: set[str]
) -> None:
    snapshot = make(lambda: stats, lambda: (FREE, TOTAL)).snapshot()
    assert {name for name, value in vars(snapshot).items() if value is None} == unknown
    assert snapshot.capacity_bytes == (TOTAL if "reserved_bytes" in unknown else 70 * GIB)


@pytest.mark.parametrize("make", PROBES)
def test_f14_zeros_beside_a_peak_are_real(make: Make) -> None:
    stats = {**ZEROS, "allocated_bytes.all.peak": 9}
    snapshot = make(lambda: stats, lambda: (FREE, TOTAL)).snapshot()
    assert snapshot.allocated_bytes == snapshot.num_ooms == 0


@pytest.mark.parametrize("make", PROBES)
@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("Cannot access accelerator device when none is available."),
        AttributeError("module has no attribute"),
        KeyError("allocated_bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_f14_readers_that_raise_are_warned_of_once(make: Make, error: Exception) -> None:
    def fail() -> Any:
        raise error

    probe = make(fail, fail)
    with pytest.warns(UserWarning, match="cannot be read .* memory counts as unknown") as caught:
        assert probe.allocated_bytes() is None
    assert set(vars(probe.snapshot()).values()) == {None}, "and a second warning is an error here"
    assert probe.allocated_bytes() is None
    assert type(error).__name__ in str(caught[0].message)
    assert "acts on out-of-memory errors only, not ahead of them" in str(caught[0].message)


def test_f14_missing_statistics_are_warned_of_once() -> None:
    probe = cuda(dict)
    with pytest.warns(UserWarning, match="missing, or zero throughout"):
        probe.snapshot()
    probe.snapshot()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ((0, TOTAL), 10 * GIB),
        ((FREE, 0), None),
        ((0, 0), None),
        ((100 * GIB, TOTAL), TOTAL),  # shared with the host: more free than there is
        ((-1, TOTAL), TOTAL),
    ],
)
@pytest.mark.filterwarnings("ignore:memory statistics of")
def test_the_capacity_is_what_others_leave(info: tuple[int, int], expected: int | None) -> None:
    assert cuda(lambda: FEED, lambda: info).snapshot().capacity_bytes == expected


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 40), (1.0, 70), (0.0, 70)])
def test_a_memory_fraction_limits_the_capacity(fraction: float, expected: int) -> None:
    assert cuda(lambda: FEED, fraction=fraction).snapshot().capacity_bytes == expected * GIB


def test_readings_change_with_the_feed_and_reset_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a counter that others read was reset")

    for module in (torch.cuda, torch.accelerator):
        for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(torch.cuda, "reset_max_memory_allocated", refuse)
    feeds: Iterator[dict[str, object]] = iter(
        [FEED, {**FEED, "allocated_bytes.all.current": 7 * GIB}, FEED]
    )
    probe = cuda(lambda: next(feeds))
    assert [probe.allocated_bytes() for _ in range(2)] == [5 * GIB, 7 * GIB]
    assert probe.snapshot().allocated_bytes == 5 * GIB


def test_without_a_device_torch_itself_is_unknown() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    for probe in (CudaProbe("cuda"), AcceleratorProbe("xpu")):
        with pytest.warns(UserWarning, match="cannot be read"):
            assert probe.snapshot() == MemorySnapshot()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert probe.allocated_bytes() is None


def test_the_nested_statistics_of_torch_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = {"allocated_bytes": {"all": {"current": 5, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: nested)
    assert CudaProbe("cuda:0").allocated_bytes() == 5


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="CudaProbe reads CUDA devices, not cpu: use another"):
        CudaProbe("cpu")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:128"},
            {"expandable_segments": "True", "max_split_size_mb": "128"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF": "a:b"},
            {"backend": "cudaMallocAsync"},
        ),
        ({"PYTORCH_HIP_ALLOC_CONF": " ,"}, {}),
    ],
)
def test_settings_of_the_allocator_come_from_the_environment(
    environment: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert allocator_settings() == expected


@pytest.mark.parametrize(
    ("settings", "expandable"),
    [("expandable_segments:True", True), ("expandable_segments:False", False), ("", False)],
)
def test_expandable_segments_are_known(
    settings: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert cuda(lambda: FEED).expandable_segments is expandable


def test_f14_an_allocator_that_counts_no_holes_leaves_them_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    snapshot = cuda(lambda: {**FEED, "inactive_split_bytes.all.current": 0}).snapshot()
    assert snapshot.inactive_split_bytes is None
    assert snapshot.allocated_bytes == 5 * GIB

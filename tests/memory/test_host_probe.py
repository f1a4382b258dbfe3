"""The host probe: bytes in use, sampled peak, capacity, and what it says it cannot know."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rematic.memory import HostProbe, Probe, glibc, process_overhead_bytes
from rematic.memory.host_limits import HostFiles

MIB = 2**20
Child = Callable[..., dict[str, Any]]

needs_glibc = pytest.mark.skipif(glibc.read_heap() is None, reason="needs glibc 2.33")


def test_it_is_a_probe() -> None:
    assert isinstance(HostProbe(), Probe)
    assert HostProbe().kind == "host"


@needs_glibc
def test_it_sees_tensors_come_and_go() -> None:
    probe = HostProbe()
    before = probe.allocated_bytes()
    tensor = torch.empty(32 * MIB, dtype=torch.uint8)
    with_it = probe.allocated_bytes()
    del tensor
    after = probe.allocated_bytes()
    assert before is not None
    assert with_it is not None
    assert after is not None
    assert 32 * MIB <= with_it - before < 33 * MIB
    assert abs(after - before) < MIB


@needs_glibc
def test_the_peak_is_the_highest_value_that_was_read() -> None:
    probe = HostProbe()
    assert probe.allocated_bytes() is not None
    unseen = torch.empty(32 * MIB, dtype=torch.uint8)
    del unseen  # came and went between two readings
    before = probe.snapshot()
    tensor = torch.empty(16 * MIB, dtype=torch.uint8)
    seen = probe.allocated_bytes()
    del tensor
    after = probe.snapshot()
    assert before.peak_allocated_bytes is not None
    assert after.allocated_bytes is not None
    assert seen is not None
    assert before.peak_allocated_bytes < seen
    assert after.peak_allocated_bytes == seen > after.allocated_bytes


@needs_glibc
def test_with_the_overhead_taken_off_it_counts_the_training() -> None:
    weights = [torch.empty(8 * MIB, dtype=torch.uint8)]
    overhead = process_overhead_bytes(8 * MIB)
    probe = HostProbe(overhead_bytes=overhead)
    allocated = probe.allocated_bytes()
    assert allocated is not None
    assert abs(allocated - 8 * MIB) < MIB
    weights.append(torch.empty(24 * MIB, dtype=torch.uint8))
    more = probe.snapshot()
    assert more.allocated_bytes is not None
    assert more.reserved_bytes is not None
    assert abs(more.allocated_bytes - 32 * MIB) < MIB
    assert more.allocated_bytes <= more.reserved_bytes


def test_an_overhead_beyond_all_that_is_in_use_leaves_nothing() -> None:
    assert HostProbe(overhead_bytes=2**50).allocated_bytes() == 0
    assert process_overhead_bytes(2**50) == 0


@needs_glibc
def test_a_snapshot_says_what_a_host_knows() -> None:
    snapshot = HostProbe(capacity_bytes=123).snapshot()
    assert snapshot.capacity_bytes == 123
    assert snapshot.num_alloc_retries is None
    assert snapshot.num_ooms is None
    assert snapshot.reserved_bytes is not None
    assert snapshot.allocated_bytes is not None
    assert snapshot.inactive_split_bytes is not None
    assert 0 <= snapshot.inactive_split_bytes <= snapshot.reserved_bytes
    assert HostProbe().notes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes is 0: expected more than 0, or None"),
        ({"overhead_bytes": -1}, "overhead_bytes is -1: expected 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostProbe(**arguments)
    with pytest.raises(ValueError, match="tensors_bytes is -1: expected 0 or more"):
        process_overhead_bytes(-1)


# --- capacity ---------------------------------------------------------------------------------


def host(tmp_path: Path, *, physical_mib: int, group_mib: int | None) -> HostFiles:
    (tmp_path / "meminfo").write_text(f"MemTotal: {physical_mib * 1024} kB\n", "ascii")
    if group_mib is not None:
        (tmp_path / "memory.max").write_text(f"{group_mib * MIB}\n", "ascii")
    return HostFiles(proc=tmp_path, cgroup=tmp_path)


@pytest.mark.parametrize(
    ("physical_mib", "group_mib", "data_mib", "expected_mib"),
    [
        pytest.param(9000, None, None, 9000, id="physical"),
        pytest.param(9000, 7000, None, 7000, id="group"),
        pytest.param(9000, 7000, 6000, 6000, id="data-limit"),
        pytest.param(5000, 7000, 6000, 5000, id="physical-is-smallest"),
    ],
)
def test_the_capacity_is_the_smallest_limit_less_the_overhead(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    physical_mib: int,
    group_mib: int | None,
    data_mib: int | None,
    expected_mib: int,
) -> None:
    limit = None if data_mib is None else data_mib * MIB
    monkeypatch.setattr("rematic.memory.host_probe.data_limit_bytes", lambda: limit)
    monkeypatch.setattr("rematic.memory.host_probe._psutil_resident_bytes", lambda: None)
    files = host(tmp_path, physical_mib=physical_mib, group_mib=group_mib)
    probe = HostProbe(overhead_bytes=100 * MIB, files=files)
    assert probe.snapshot().capacity_bytes == (expected_mib - 100) * MIB


def test_without_any_limit_the_capacity_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rematic.memory.host_probe.data_limit_bytes", lambda: None)
    probe = HostProbe(files=HostFiles(proc=tmp_path, cgroup=tmp_path))
    assert probe.snapshot().capacity_bytes is None


@needs_glibc
def test_under_a_heap_cap_the_capacity_is_what_can_be_reached(child: Child) -> None:
    told = child("""
        use_mapping_malloc()
        warm_up_threads()
        weights = torch.empty(20 * 2**20, dtype=torch.uint8)
        probe = HostProbe(overhead_bytes=process_overhead_bytes(20 * 2**20))
        uncapped = probe.snapshot().capacity_bytes
        with capped_heap(100 * 2**20):
            capped = probe.snapshot().capacity_bytes
            kept = []
            try:
                while True:
                    kept.append(torch.empty(2**20, dtype=torch.uint8))
            except RuntimeError:
                reached = probe.allocated_bytes()
            del kept
        tell(uncapped=uncapped, capped=capped, reached=reached)
    """)
    assert told["uncapped"] > told["capped"]
    assert told["capped"] == pytest.approx(120 * MIB, abs=4 * MIB)
    assert told["reached"] == pytest.approx(told["capped"], abs=4 * MIB)


# --- without glibc ----------------------------------------------------------------------------


def test_without_glibc_resident_memory_stands_in_and_the_probe_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(glibc, "make_in_use_reader", lambda: None)
    monkeypatch.setattr(glibc, "read_heap", lambda: None)
    probe = HostProbe()
    allocated, resident = probe.allocated_bytes(), probe.resident_bytes()
    assert allocated is not None
    assert resident is not None
    assert abs(allocated - resident) < 16 * MIB
    snapshot = probe.snapshot()
    assert snapshot.reserved_bytes is None
    assert snapshot.inactive_split_bytes is None
    assert "bytes in use are those resident" in probe.notes[0]
    assert probe.notes[1] == "reserved bytes and fragmentation are not known"


def test_without_kernel_files_psutil_tells_what_is_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glibc, "make_in_use_reader", lambda: None)
    probe = HostProbe(files=HostFiles(proc=tmp_path, cgroup=tmp_path))
    assert (probe.allocated_bytes() or 0) > MIB
    assert (probe.resident_bytes() or 0) > MIB


def test_with_nothing_to_read_nothing_is_known_and_the_probe_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glibc, "make_in_use_reader", lambda: None)
    monkeypatch.setattr(glibc, "read_heap", lambda: None)
    monkeypatch.setattr("rematic.memory.host_probe.data_limit_bytes", lambda: None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError):
        builtins.__import__("psutil")
    probe = HostProbe(files=HostFiles(proc=tmp_path, cgroup=tmp_path))
    assert probe.allocated_bytes() is None
    assert probe.resident_bytes() is None
    snapshot = probe.snapshot()
    assert set(vars(snapshot).values()) == {None}
    assert "psutil is not installed" in probe.notes[0]
    assert process_overhead_bytes(5, files=HostFiles(proc=tmp_path, cgroup=tmp_path)) == 0

"""The disk stash: what it holds, what it gives back, and what happens when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rematic.memory import glibc, is_out_of_memory
from rematic.stash import DiskStash, Handle, StashError
from rematic.stash import disk as disk_module
from rematic.stash.scratch_file import PAGE_BYTES
from tests.stash.bits import assert_same
from tests.stash.child import run_child

linux_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or glibc.read_heap() is None,
    reason="the cap needs Linux with glibc 2.33",
)


def ones(num_pages: int) -> torch.Tensor:
    return torch.ones(num_pages * PAGE_BYTES, dtype=torch.uint8)


def taken(handles: list[Handle]) -> list[Handle]:
    return [handle for handle in handles if handle is not None]


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_bytes_held_are_whole_pages_of_each_storage_once(disk: DiskStash) -> None:
    base = ones(3)
    handles = disk.put([base, base[10:], torch.ones(10)])
    assert [handle.stored_bytes for handle in taken(handles)] == [
        *(3 * PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES),
    ]
    assert [handle.nbytes for handle in taken(handles)] == [3 * PAGE_BYTES, 3 * PAGE_BYTES, 40]
    assert disk.used_bytes == 4 * PAGE_BYTES
    assert disk.file_bytes == disk.path.stat().st_size == 2**16
    handles.clear()
    assert disk.used_bytes == 0


def test_the_source_may_be_changed_and_freed_after_put(disk: DiskStash) -> None:
    source = torch.arange(10_000)
    (handle,) = taken(disk.put([source]))
    storage = weakref.ref(source.untyped_storage())
    source.zero_()
    del source
    assert storage() is None
    assert_same(handle.get(), torch.arange(10_000))


def test_a_segment_stays_as_long_as_a_tensor_from_it_lives(disk: DiskStash) -> None:
    handles = disk.put([ones(4)])
    tensor = taken(handles)[0].get()
    handles.clear()
    assert disk.used_bytes == 4 * PAGE_BYTES
    view = tensor[5:]
    del tensor
    (other,) = taken(disk.put([torch.zeros(4 * PAGE_BYTES, dtype=torch.uint8)]))
    assert view.eq(1).all()
    del view
    assert disk.used_bytes == 4 * PAGE_BYTES  # the other one's
    assert other.get().eq(0).all()


def test_handles_outlive_the_stash_that_made_them(tmp_path: Path) -> None:
    stash = DiskStash(tmp_path, min_bytes=0)
    path = stash.path
    handles = taken(stash.put([torch.arange(1000)]))
    del stash
    assert path.exists()
    assert_same(handles[0].get(), torch.arange(1000))
    handles.clear()
    assert not path.exists()


def test_after_close_what_came_back_is_valid_and_the_rest_is_named(tmp_path: Path) -> None:
    stash = DiskStash(tmp_path, min_bytes=0)
    first, second = taken(stash.put([torch.arange(1000), torch.arange(500)]))
    tensor = first.get()
    stash.close()
    stash.prefetch([second])
    assert_same(tensor, torch.arange(1000))
    with pytest.raises(RuntimeError) as caught:
        second.get()
    assert str(caught.value) == (
        f"a tensor of 4000 bytes cannot be read: its scratch file {stash.path} was closed before "
        "backward asked for it. Close the stash after the last backward."
    )
    with pytest.raises(StashError, match="the disk stash was closed"):
        stash.put([torch.arange(1000)])


def test_at_the_cap_nothing_is_taken_and_nothing_is_lost(tmp_path: Path) -> None:
    stash = DiskStash(tmp_path, cap_bytes=10 * PAGE_BYTES, min_bytes=0)
    (held,) = taken(stash.put([ones(4)]))
    tensors = [torch.arange(100), ones(3), ones(4)]
    with pytest.raises(StashError) as caught:
        stash.put(tensors)
    assert str(caught.value) == (
        f"cannot move {4 * PAGE_BYTES / 1024:.1f} KiB to {stash.path}: it may not grow beyond its "
        f"cap of {10 * PAGE_BYTES} bytes. The file has {10 * PAGE_BYTES} bytes, of which "
        f"{8 * PAGE_BYTES} are in use and at most {2 * PAGE_BYTES} are free in one piece. The "
        "tensors stay in memory. Make room on that disk, raise cap_bytes, or choose another "
        "directory."
    )
    assert not is_out_of_memory(caught.value)  # evicting would not help
    assert stash.used_bytes == 4 * PAGE_BYTES
    assert held.get().eq(1).all()
    assert torch.equal(tensors[0], torch.arange(100))
    assert len(taken(stash.put(tensors[:2]))) == 2
    stash.close()


def test_a_file_size_limit_is_met_before_anything_is_written(tmp_path: Path) -> None:
    stash = DiskStash(tmp_path, min_bytes=0, chunk_bytes=2**20)
    tensors = [torch.randn(2**16), torch.randn(2**19)]  # 256 KiB and 2 MiB
    copies = [tensor.clone() for tensor in tensors]
    with largest_file(2**19):
        handles = stash.put(tensors[:1])  # the chunk is too large, the tensor is not
        assert stash.file_bytes == 2**18
        with pytest.raises(StashError, match=r"cannot move 2\.0 MiB .*: File too large\. The file"):
            stash.put(tensors)
        assert stash.used_bytes == 2**18
        assert stash.path.stat().st_size == stash.file_bytes == 2**19  # that of the first one
    handles += stash.put(tensors)
    for handle, copied in zip(taken(handles), [copies[0], *copies], strict=True):
        assert_same(handle.get(), copied)
    stash.close()


def test_a_disk_that_fills_up_while_it_is_written(
    disk: DiskStash, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, calls = os.pwrite, []

    def write(fd: int, memory: memoryview, place: int) -> int:
        calls.append(place)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, memory[:5000], place)

    monkeypatch.setattr(os, "pwrite", write)
    tensor = torch.arange(2000)
    with pytest.raises(StashError, match="No space left on device") as caught:
        disk.put([torch.arange(10), tensor])
    assert isinstance(caught.value.__cause__, OSError)
    assert disk.used_bytes == 0
    assert_same(tensor, torch.arange(2000))
    monkeypatch.undo()
    (handle,) = taken(disk.put([tensor]))
    assert_same(handle.get(), tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap_bytes": 10}, f"cap_bytes is 10: expected None or at least one page of {PAGE_BYTES}"),
        ({"chunk_bytes": 0}, f"chunk_bytes is 0: expected {PAGE_BYTES} or more"),
    ],
)
def test_sizes_out_of_range_are_refused(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DiskStash(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_device_is_written_piece_by_piece(
    disk: DiskStash, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        """A span that says it is not on the CPU."""

        device = torch.device("cuda")

        def elements(self, dtype: torch.dtype) -> torch.Tensor:
            return source.view(dtype)

    monkeypatch.setattr(disk_module, "_PIECE_BYTES", 333)
    source = torch.arange(500)
    (handle,) = taken(disk.put([torch.zeros(500, dtype=torch.int64)]))
    block = handle.block  # type: ignore[attr-defined]
    disk_module._write(block._file, block._segment, Elsewhere())  # type: ignore[arg-type]
    assert_same(handle.get(), source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_tensors_come_back_to_their_device(disk: DiskStash) -> None:
    source = torch.randn(1000, 64, device="cuda")
    first, second = taken(disk.put([source.t(), source[7]]))
    assert torch.equal(first.get(), source.t())
    assert torch.equal(second.get(), source[7])
    assert second.get().device == source.device


@linux_glibc
def test_what_is_on_the_disk_takes_nothing_of_a_capped_heap(tmp_path: Path) -> None:
    """Eight times 32 MiB under a cap of 100 MiB, all of them in use at once in the end."""
    told = run_child(
        """
        from rematic.memory import (
            capped_heap, is_out_of_memory, use_mapping_malloc, warm_up_threads
        )
        use_mapping_malloc()
        warm_up_threads()

        def make(number):
            return torch.full((2**23,), float(number))

        def data_bytes():
            lines = open("/proc/self/status").read().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if "VmData" in line)

        stash = DiskStash(sys.argv[1])
        handles = stash.put([make(99)])
        before = data_bytes()
        with capped_heap(100 * 2**20) as cap:
            held, failed = [], False
            try:
                held = [make(number) for number in range(8)]
            except RuntimeError as error:
                cap.release_ballast()
                failed = is_out_of_memory(error)
                error.__traceback__ = None
            cap.hold_ballast()
            handles = [handle for number in range(8) for handle in stash.put([make(number)])]
            tensors = [handle.get() for handle in handles]
            sums = [float(tensor[::4096].sum() / 2048) for tensor in tensors]
            after = data_bytes()
        tell(failed=failed, sums=sums, grown=after - before, used=stash.used_bytes)
        """,
        str(tmp_path),
    )
    assert told["failed"] is True
    assert told["sums"] == list(range(8))
    assert told["used"] == 8 * 2**25
    assert told["grown"] < 8 * 2**20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_pages_that_were_read_leave_the_process_with_their_tensor(disk: DiskStash) -> None:
    def mapped_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    (handle,) = taken(disk.put([torch.ones(2**23)]))
    before = mapped_bytes()
    tensor = handle.get()
    assert tensor.sum() == 2**23
    assert mapped_bytes() - before > 30 * 2**20
    del tensor
    assert mapped_bytes() - before < 4 * 2**20
    assert handle.get().sum() == 2**23


def test_a_thousand_puts_leave_nothing_behind(disk: DiskStash) -> None:
    """F19: with the collector off."""

    def use() -> None:
        base = torch.ones(64, 64)
        first, second, third = taken(disk.put([base, base.t(), torch.ones(3)]))
        tensor = first.get()
        assert tensor.sum() == 4096
        disk.prefetch([second, third])
        del first
        assert second.get().untyped_storage() is tensor.untyped_storage()

    for _ in range(10):
        use()
    gc.collect()
    num_files = len(os.listdir("/dev/fd"))
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(1000):
            use()
        grown = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert grown < 20
    assert disk.used_bytes == 0
    assert disk.file_bytes == 2**16
    assert len(os.listdir("/dev/fd")) == num_files


def test_failed_puts_leave_nothing_behind(tmp_path: Path) -> None:
    stash = DiskStash(tmp_path, cap_bytes=8 * PAGE_BYTES, min_bytes=0)
    gc.disable()
    try:
        storages = []
        for _ in range(20):
            tensors = [ones(4), ones(5)]
            storages += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
            with pytest.raises(StashError):
                stash.put(tensors)
            del tensors
        assert [ref for ref in storages if ref() is not None] == []
    finally:
        gc.enable()
    assert stash.used_bytes == 0
    stash.close()


def test_threads_may_use_it_together(disk: DiskStash) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(60):
            value = float(1000 * number + step)
            tensors = [torch.full((200 + step,), value), torch.full((3000,), value)]
            for handle in taken(disk.put(tensors)):
                if not handle.get().eq(value).all():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert disk.used_bytes == 0

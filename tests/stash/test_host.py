"""The host stash: caps, overflow, the window of copies under way, prefetch, devices."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from rematic.stash import DiskStash, Handle, HostStash, Stash, StashError
from rematic.stash.copies import Copies, PlainCopies, StreamCopies
from tests.stash.bits import assert_same
from tests.stash.simulated_device import SimulatedDevice

KIB = 1024


def simulated(
    device: SimulatedDevice,
    *,
    cap_bytes: int | None = None,
    overflow: Stash | None = None,
    in_flight_bytes: int = 64 * KIB,
) -> HostStash:
    copies: Copies = StreamCopies(device)
    return HostStash(
        cap_bytes=cap_bytes,
        overflow=overflow,
        min_bytes=0,
        in_flight_bytes=in_flight_bytes,
        make_copies=lambda _: copies,
    )


def kib(number: int, *, value: int = 1) -> torch.Tensor:
    return torch.full((number * KIB,), value, dtype=torch.uint8)


def taken(handles: list[Handle | None]) -> list[Handle]:
    return [handle for handle in handles if handle is not None]


def test_tensors_of_the_cpu_stay_as_they_are_on_the_host_already() -> None:
    assert HostStash().put([torch.ones(2**16)]) == [None]


def test_tensors_of_the_cpu_go_on_to_the_overflow(disk: DiskStash) -> None:
    stash = HostStash(overflow=disk, min_bytes=4 * KIB)
    handles = stash.put([kib(4), kib(1), kib(8, value=3)])
    assert [handle is not None for handle in handles] == [True, False, True]
    assert (stash.used_bytes, disk.used_bytes) == (0, 12 * KIB)
    stash.prefetch(taken(handles))
    assert_same(taken(handles)[1].get(), kib(8, value=3))
    stash.close()
    assert not disk.path.exists()


def test_what_finds_no_room_overflows(disk: DiskStash) -> None:
    stash = HostStash(
        cap_bytes=8 * KIB, overflow=disk, min_bytes=0, make_copies=lambda _: PlainCopies()
    )
    base = kib(8, value=2)
    tensors = [kib(4), base, kib(2), base[7:], kib(2)]
    handles = taken(stash.put(tensors))
    assert (stash.used_bytes, disk.used_bytes) == (8 * KIB, 8 * KIB)
    for handle, tensor in zip(handles, tensors, strict=True):
        assert_same(handle.get(), tensor)
    whole, part = handles[1].get(), handles[3].get()
    assert whole.untyped_storage() is part.untyped_storage()
    del handle, handles
    assert stash.used_bytes == 0


def test_without_overflow_nothing_is_taken_beyond_the_cap() -> None:
    stash = HostStash(cap_bytes=8 * KIB, min_bytes=0, make_copies=lambda _: PlainCopies())
    held = stash.put([kib(2)])
    with pytest.raises(StashError) as caught:
        stash.put([kib(4), kib(4)])
    assert str(caught.value) == (
        "cannot move 4.0 KiB to host memory: 6144 bytes are held there under a cap of 8192 bytes, "
        "and there is no overflow. The tensors stay on the device. Raise cap_bytes, or give the "
        "host stash a disk stash as its overflow."
    )
    assert stash.used_bytes == 2 * KIB
    assert len(taken(held)) == 1


def test_if_the_overflow_has_no_room_either_nothing_is_taken(disk: DiskStash) -> None:
    disk.close()
    stash = HostStash(
        cap_bytes=8 * KIB, overflow=disk, min_bytes=0, make_copies=lambda _: PlainCopies()
    )
    with pytest.raises(StashError, match="the disk stash was closed"):
        stash.put([kib(4), kib(8)])
    assert stash.used_bytes == 0


def test_host_memory_that_cannot_be_had_counts_as_full(disk: DiskStash) -> None:
    class Poor(SimulatedDevice):
        def pinned(self, num_bytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    stash = simulated(Poor(), overflow=disk)
    (handle,) = taken(stash.put([kib(4, value=9)]))
    assert (stash.used_bytes, disk.used_bytes) == (0, 4 * KIB)
    assert_same(handle.get(), kib(4, value=9))


def test_other_errors_are_not_hidden() -> None:
    class Broken(SimulatedDevice):
        def pinned(self, num_bytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        simulated(Broken()).put([kib(4)])


def test_put_waits_only_when_too_much_is_under_way() -> None:
    device = SimulatedDevice()
    stash = simulated(device, in_flight_bytes=10 * KIB)
    handles = taken(stash.put([kib(4), kib(4)]))
    assert device.num_waits == 0
    handles += taken(stash.put([kib(4)]))
    assert device.num_waits == 1  # for the oldest; 8 KiB are under way
    handles += taken(stash.put([kib(12)]))
    assert device.num_waits == 3  # larger than the window: alone
    device.streams[0].synchronize()
    handles += taken(stash.put([kib(10)]))
    assert device.num_waits == 3


def test_the_source_is_free_for_its_owner_at_once() -> None:
    device = SimulatedDevice()
    stash = simulated(device)
    tensor = kib(4, value=5)
    address, storage = tensor.data_ptr(), weakref.ref(tensor.untyped_storage())
    (handle,) = taken(stash.put([tensor]))
    assert device.kept == [(address, device.streams[0])]
    del tensor
    device.streams[0].synchronize()  # the simulated queue holds what a real one keeps allocated
    assert storage() is None
    assert device.read(handle.get()).eq(5).all()


def test_prefetch_copies_once_within_the_window_and_get_does_not_wait() -> None:
    device = SimulatedDevice()
    stash = simulated(device, in_flight_bytes=10 * KIB)
    handles = taken(stash.put([kib(4, value=number) for number in range(4)]))
    assert device.num_copies == 4
    stash.prefetch(handles)
    assert device.num_copies == 6  # 8 of 10 KiB
    stash.prefetch(handles)
    assert device.num_copies == 6
    waits = device.num_waits
    tensors = [handles[0].get(), handles[1].get()]
    assert device.num_copies == 6
    stash.prefetch(handles[2:])
    assert device.num_copies == 8
    tensors += [handles[2].get(), handles[3].get()]
    assert device.num_copies == 8
    assert device.num_waits == waits
    for number, tensor in enumerate(tensors):
        assert device.read(tensor).eq(number).all()


def test_prefetched_memory_goes_with_its_handles_or_its_readers() -> None:
    device = SimulatedDevice()
    stash = simulated(device, in_flight_bytes=10 * KIB)
    handles = taken(stash.put([kib(4), kib(4)]))
    stash.prefetch(handles)
    blocks = [handle.block for handle in handles]  # type: ignore[attr-defined]
    for stream in (*device.streams, device.compute):
        stream.synchronize()
    assert [block.waiting_bytes for block in blocks] == [4 * KIB, 4 * KIB]
    storage = weakref.ref(handles[0].get().untyped_storage())
    device.compute.synchronize()
    assert storage() is None  # read, and held by nobody
    assert [block.waiting_bytes for block in blocks] == [0, 4 * KIB]
    del blocks
    handles.clear()
    assert stash.used_bytes == 0
    handles = taken(stash.put([kib(8)]))
    stash.prefetch(handles)  # the window is free again
    assert handles[0].block.waiting_bytes == 8 * KIB  # type: ignore[attr-defined]


def test_prefetch_gives_way_when_the_device_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = PlainCopies()
    stash = HostStash(min_bytes=0, make_copies=lambda _: copies)
    (handle,) = taken(stash.put([kib(4, value=6)]))

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 KiB")

    monkeypatch.setattr(copies, "to_device", refuse)
    stash.prefetch([handle])
    with pytest.raises(torch.OutOfMemoryError):
        handle.get()
    monkeypatch.undo()
    assert_same(handle.get(), kib(4, value=6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap_bytes": -1}, "cap_bytes is -1: expected None or 0 and more"),
        ({"in_flight_bytes": 0}, "in_flight_bytes is 0: expected more than 0"),
    ],
)
def test_sizes_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostStash(**options)  # type: ignore[arg-type]


def test_it_is_lossy_where_its_overflow_is() -> None:
    class Lossy(HostStash):
        lossy = True  # type: ignore[assignment]

    assert HostStash(overflow=Lossy()).lossy is True
    assert HostStash().lossy is False


def test_a_thousand_puts_leave_nothing_behind() -> None:
    device = SimulatedDevice()
    stash = simulated(device)

    def use() -> None:
        base = torch.ones(32, 32)
        first, second = taken(stash.put([base, base.t()]))
        stash.prefetch([first])
        assert device.read(second.get()).sum() == 1024
        for stream in device.streams:
            stream.synchronize()
        device.kept.clear()

    for _ in range(10):
        use()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(1000):
            use()
        grown = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert grown < 20
    assert stash.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_tensors_leave_the_device_and_come_back() -> None:
    stash = HostStash(in_flight_bytes=2**22)
    expected = [torch.randn(2**19, device="cuda") for _ in range(8)]
    before = torch.cuda.memory_allocated()
    tensors = [tensor * 1 for tensor in expected]
    handles = taken(stash.put([tensor.view(512, 1024).t() for tensor in tensors]))
    del tensors
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    stash.prefetch(handles)
    for handle, tensor in zip(handles, expected, strict=True):
        assert torch.equal(handle.get(), tensor.view(512, 1024).t())
    assert stash.used_bytes == 8 * 2**21

"""The order of copies, on a device that runs nothing before somebody waits for it."""

from __future__ import annotations

import pytest
import torch

from rematic.stash.copies import Copies, PlainCopies, StreamCopies, copies_for
from tests.stash.simulated_device import NOISE, SimulatedDevice

CPU = torch.device("cpu")


def round_trip(device: SimulatedDevice) -> torch.Tensor:
    """Computes bytes, moves them out and back, and reads them, without the host ever waiting."""
    copies: Copies = StreamCopies(device)
    source = torch.zeros(100, dtype=torch.uint8)
    device.compute_into(source, torch.arange(100, dtype=torch.uint8))
    host = copies.to_host(source)
    back = copies.to_device(host, CPU)
    copies.wait(back.done)
    return device.read(back.tensor)


def test_copies_wait_for_what_they_need_and_the_host_for_nothing() -> None:
    device = SimulatedDevice()
    assert torch.equal(round_trip(device), torch.arange(100, dtype=torch.uint8))
    assert device.num_waits == 0
    assert len(device.streams) == 2


def test_a_copy_to_the_host_waits_for_the_kernel_that_makes_its_bytes() -> None:
    device = SimulatedDevice()
    copies: Copies = StreamCopies(device)
    source = torch.zeros(100, dtype=torch.uint8)
    device.compute_into(source, torch.arange(100, dtype=torch.uint8))
    host = copies.to_host(source)
    assert host.tensor.eq(NOISE).all()
    assert host.done is not None
    host.done.synchronize()
    assert torch.equal(host.tensor, torch.arange(100, dtype=torch.uint8))


def test_the_simulated_device_shows_a_missing_wait() -> None:
    assert round_trip(SimulatedDevice(deaf=True)).eq(NOISE).all()


def test_memory_is_not_reused_while_a_copy_may_use_it() -> None:
    device = SimulatedDevice()
    copies: Copies = StreamCopies(device)
    source = torch.zeros(10, dtype=torch.uint8)
    host = copies.to_host(source)
    back = copies.to_device(host, CPU)
    out, in_ = device.streams
    assert device.kept == [(source.data_ptr(), out), (back.tensor.data_ptr(), in_)]


def test_plain_copies_are_done_and_independent() -> None:
    copies: Copies = PlainCopies()
    source = torch.arange(10, dtype=torch.uint8)
    host = copies.to_host(source)
    source.zero_()
    back = copies.to_device(host, CPU)
    host.tensor[0] = 7
    copies.wait(back.done)
    assert back.tensor.tolist() == list(range(10))


def test_which_devices_have_copies() -> None:
    assert copies_for(CPU) is None
    assert isinstance(copies_for(torch.device("mps")), PlainCopies)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_bytes_go_out_and_come_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = copies_for(device)
    assert copies is not None
    source = torch.arange(2**20, device=device).view(torch.uint8)
    expected = source.clone()
    host = copies.to_host(source)
    del source
    torch.full((2**20,), -1, device=device)  # would take the memory, were it free already
    back = copies.to_device(host, device)
    copies.wait(back.done)
    assert host.tensor.is_pinned()
    assert torch.equal(back.tensor, expected)

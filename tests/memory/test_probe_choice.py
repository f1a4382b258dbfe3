"""Which probe reads which device."""

from __future__ import annotations

import pytest
import torch

from rematic.memory import AcceleratorProbe, CudaProbe, HostProbe, SimulatedProbe, make_probe

CPU, CUDA, XPU = (torch.device(name) for name in ("cpu", "cuda", "xpu"))


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        (None, CPU, HostProbe),
        ("auto", CPU, HostProbe),
        ("host", CPU, HostProbe),
        ("auto", CUDA, CudaProbe),
        ("cuda", CUDA, CudaProbe),
        ("auto", XPU, AcceleratorProbe),
        ("accelerator", XPU, AcceleratorProbe),
        ("accelerator", CUDA, AcceleratorProbe),
        ("simulated", CPU, SimulatedProbe),
        ("simulated", CUDA, SimulatedProbe),
    ],
)
def test_the_probe_suits_kind_and_device(
    kind: str | None, device: torch.device, expected: type
) -> None:
    assert type(make_probe(kind, device=device)) is expected


def test_a_probe_is_returned_as_it_is() -> None:
    probe = SimulatedProbe()
    assert make_probe(probe, device=CUDA) is probe


def test_the_numbers_reach_the_probe() -> None:
    host = make_probe("host", device=CPU, capacity_bytes=1000, overhead_bytes=2**50)
    assert host.snapshot().capacity_bytes == 1000
    assert host.allocated_bytes() == 0
    simulated = make_probe("simulated", device=CPU, capacity_bytes=1000)
    assert simulated.snapshot().capacity_bytes == 1000


def test_what_is_no_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="the probe 5 is none: expected a probe, or one of"):
        make_probe(5, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "device", "message"),
    [
        ("cuda", CPU, "the probe 'cuda' cannot read the memory of cpu: expected 'host'"),
        ("host", CUDA, "the probe 'host' cannot read the memory of cuda: expected 'cuda'"),
        ("cuda", XPU, "the probe 'cuda' cannot read the memory of xpu: expected 'accelerator'"),
        ("accelerator", CPU, "the probe 'accelerator' cannot read the memory of cpu: expected 'ho"),
        ("gpu", CPU, "there is no probe 'gpu': expected a probe, or one of .*'simulated'"),
    ],
)
def test_a_probe_that_cannot_read_the_device_is_refused(
    kind: str, device: torch.device, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_probe(kind, device=device)

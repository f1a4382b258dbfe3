"""Chooses the probe of a device."""

from __future__ import annotations

import torch

from rematic.memory.device_probe import AcceleratorProbe, CudaProbe
from rematic.memory.host_probe import HostProbe
from rematic.memory.simulated_probe import SimulatedProbe
from rematic.memory.snapshot import Probe

_KINDS = ("auto", "host", "cuda", "accelerator", "simulated")
_KIND_OF_DEVICE = {"cpu": "host", "cuda": "cuda"}


def make_probe(
    kind: str | Probe | None,
    *,
    device: torch.device,
    capacity_bytes: int | None = None,
    overhead_bytes: int = 0,
) -> Probe:
    """Returns a probe for the memory that a model on `device` fills.

    Args:
        kind: `auto` (or None) for the one that suits the device, `host`, `cuda`, `accelerator`,
            `simulated`, or a probe, which is returned as it is.
        device: Where the parameters of the model are.
        capacity_bytes: Of a host, bytes that training may use; of a simulated device, its budget.
        overhead_bytes: Of a host, bytes in use that are no concern of the training.

    Raises:
        ValueError: If there is no such kind, or it cannot read the device.
    """
    if isinstance(kind, Probe):
        return kind
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"the probe {kind!r} is none: expected a probe, or one of {_KINDS}")
    chosen = _KIND_OF_DEVICE.get(device.type, "accelerator") if kind in (None, "auto") else kind
    if chosen == "host" and device.type == "cpu":
        return HostProbe(capacity_bytes, overhead_bytes)
    if chosen == "cuda" and device.type == "cuda":
        return CudaProbe(device)
    if chosen == "accelerator" and device.type != "cpu":
        return AcceleratorProbe(device)
    if chosen == "simulated":
        return SimulatedProbe(capacity_bytes)
    if chosen in _KINDS:
        suitable = _KIND_OF_DEVICE.get(device.type, "accelerator")
        raise ValueError(
            f"the probe {chosen!r} cannot read the memory of {device}: expected {suitable!r}, "
            "'simulated' or 'auto'"
        )
    raise ValueError(f"there is no probe {chosen!r}: expected a probe, or one of {_KINDS}")

"""How long an op takes: as long as its arithmetic or its traffic, whichever is longer.

(Williams et al. 2009, "Roofline: an insightful visual performance model for multicore
architectures".)
"""

from __future__ import annotations

from rematic.cost.devices import Device
from rematic.planner import OpCost, Pace


def op_seconds(op: OpCost, device: Device) -> float:
    """Returns the time of one op on a device.

    Args:
        op: The op.
        device: The device.
    """
    arithmetic = op.flops / device.rate(op.dtype)
    traffic = op.touched_bytes / device.bytes_per_second
    return max(arithmetic, traffic) / device.attained_share


def pace_of(device: Device) -> Pace:
    """Returns how fast a device is, as the planner asks.

    Args:
        device: The device.
    """
    return Pace(
        op_seconds=lambda op: op_seconds(op, device),
        replay_seconds=device.replay_seconds,
        selective_seconds=device.selective_seconds,
        moved_bytes_per_second=device.link_bytes_per_second * device.attained_share,
        overlaps_host=device.overlaps_host,
    )

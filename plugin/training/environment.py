"""How a process that trains on a CPU should be started."""

from __future__ import annotations

import os


def training_environment() -> dict[str, str]:
    """The environment of a process that trains on a CPU.

    Threads that wait for one another sleep instead of spinning: where other programs use the
    cores too, spinning halves the speed and more (1,024 tokens of `tiny-cpu` on two busy cores:
    42 to 131 tokens/s spinning, 208 to 217 sleeping). What the user has set stays.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}

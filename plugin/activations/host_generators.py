"""The generators outside torch that a forward may draw from: Python's and NumPy's global ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class HostGenerator:
    """Gives and takes the state of a generator, as `torch.Generator` does with tensors.

    Args:
        name: What it is called.
        read: Returns the state.
        write: Takes a state that `read` returned.
    """

    def __init__(
        self, name: str, *, read: Callable[[], Any], write: Callable[[Any], object]
    ) -> None:
        self.name = name
        self._read = read
        self._write = write

    def get_state(self) -> bytes:
        """Returns the state; 40 us, so it is asked for only where it matters."""
        return pickle.dumps(self._read())

    def set_state(self, state: bytes) -> None:
        """Puts the generator back to where `get_state` saw it."""
        self._write(pickle.loads(state))


def _numpy_random() -> Any:  # looked up and not imported, as it need not be installed
    return sys.modules.get("numpy.random")


def _write_numpy(state: Any) -> None:
    if state is not None:
        _numpy_random().set_state(state)


HOST_GENERATORS = (
    HostGenerator("random", read=random.getstate, write=random.setstate),
    HostGenerator(
        "numpy.random",
        read=lambda: None if _numpy_random() is None else _numpy_random().get_state(),
        write=_write_numpy,
    ),
)
"""Both of them. Torch's own are always restored, these where the first forward drew from them."""


def save_generators(*, with_devices: bool = False) -> Callable[[], None]:
    """Takes down the state of both and of torch's on the CPU; returns what puts all of it back.

    Args:
        with_devices: Whether those of the accelerator's devices count too, if it is in use.
    """
    hosts = [(generator, generator.get_state()) for generator in HOST_GENERATORS]
    of_torch = torch.get_rng_state()
    put_devices_back = _save_devices() if with_devices else None

    def put_back() -> None:
        torch.set_rng_state(of_torch)
        for generator, state in hosts:
            generator.set_state(state)
        if put_devices_back is not None:
            put_devices_back()

    return put_back


def _save_devices() -> Callable[[], None] | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # torch.cuda, torch.xpu, ...: modules without a common type
    module: Any = None if found is None else torch.get_device_module(found)
    if not hasattr(module, "get_rng_state_all") or not module.is_initialized():
        return None
    states = module.get_rng_state_all()
    return lambda: module.set_rng_state_all(states)

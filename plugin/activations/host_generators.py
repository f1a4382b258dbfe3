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


def save_generators() -> Callable[[], None]:
    """Takes down the state of both and of torch's on the CPU; returns what puts all of it back."""
    hosts = [(generator, generator.get_state()) for generator in HOST_GENERATORS]
    of_torch = torch.get_rng_state()

    def put_back() -> None:
        torch.set_rng_state(of_torch)
        for generator, state in hosts:
            generator.set_state(state)

    return put_back

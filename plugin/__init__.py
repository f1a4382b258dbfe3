"""Keep long-sequence fine-tuning inside the memory of the device it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rematic.activations import ReplayError as ReplayError
from rematic.activations import replaying as replaying
from rematic.attachment import attach as attach
from rematic.batch_shape import BatchShape as BatchShape
from rematic.policy import Policy as Policy
from rematic.policy import Rule as Rule
from rematic.session import Session as Session
from rematic.version import __version__ as __version__

if TYPE_CHECKING:
    from rematic.hosts.lightning import RecomputeStrategy as RecomputeStrategy

_LAZY = {"RecomputeStrategy": "rematic.hosts.lightning"}


def __getattr__(name: str) -> object:
    """Loads host classes on first use, so that the core imports without their packages."""
    if name not in _LAZY:
        raise AttributeError(f"module 'rematic' has no attribute {name!r}")
    from importlib import import_module

    host: object = getattr(import_module(_LAZY[name]), name)
    return host

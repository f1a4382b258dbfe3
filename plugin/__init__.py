"""Keep long-sequence fine-tuning inside the memory of the device it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rematic.version import __version__ as __version__

if TYPE_CHECKING:
    from rematic.activations import ReplayError as ReplayError
    from rematic.activations import replaying as replaying
    from rematic.activations.tiled_loss import tiled_cross_entropy as tiled_cross_entropy
    from rematic.attachment import attach as attach
    from rematic.batch_shape import BatchShape as BatchShape
    from rematic.hosts.accelerate import RecomputePlugin as RecomputePlugin
    from rematic.hosts.lightning import RecomputeStrategy as RecomputeStrategy
    from rematic.hosts.lightning_ranks import RecomputeDDPStrategy as RecomputeDDPStrategy
    from rematic.hosts.lightning_ranks import RecomputeFSDPStrategy as RecomputeFSDPStrategy
    from rematic.hosts.lightning_ranks import (
        RecomputeModelParallelStrategy as RecomputeModelParallelStrategy,
    )
    from rematic.hosts.transformers_loss import use_tiled_loss as use_tiled_loss
    from rematic.policy import Policy as Policy
    from rematic.policy import Rule as Rule
    from rematic.session import Session as Session
    from rematic.step_recovery import StepOutOfMemoryError as StepOutOfMemoryError
    from rematic.supervisor import RunStoppedError as RunStoppedError
    from rematic.torn_step import TornOptimizerStepError as TornOptimizerStepError

# Loaded on first use: recipes and the command read YAML without waiting for torch, and the core
# works without Lightning.
_HOMES = {
    "BatchShape": "rematic.batch_shape",
    "Policy": "rematic.policy",
    "RecomputeDDPStrategy": "rematic.hosts.lightning_ranks",
    "RecomputeFSDPStrategy": "rematic.hosts.lightning_ranks",
    "RecomputeModelParallelStrategy": "rematic.hosts.lightning_ranks",
    "RecomputePlugin": "rematic.hosts.accelerate",
    "RecomputeStrategy": "rematic.hosts.lightning",
    "ReplayError": "rematic.activations",
    "Rule": "rematic.policy",
    "RunStoppedError": "rematic.supervisor",
    "Session": "rematic.session",
    "StepOutOfMemoryError": "rematic.step_recovery",
    "TornOptimizerStepError": "rematic.torn_step",
    "attach": "rematic.attachment",
    "replaying": "rematic.activations",
    "tiled_cross_entropy": "rematic.activations.tiled_loss",
    "use_tiled_loss": "rematic.hosts.transformers_loss",
}


def __getattr__(name: str) -> object:
    """Loads a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rematic' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

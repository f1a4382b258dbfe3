"""What the optimizer of a recipe will hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rematic.cost import adam_8bit_bytes, trace_optimizer
from rematic.recipes import AdamWConfig, TargetOptimizerConfig, TrainingConfig
from rematic.training.optimization import build_optimizer


def optimizer_state_bytes(parameters: Iterable[nn.Parameter], training: TrainingConfig) -> int:
    """Bytes of the state over weights on any device, `meta` included.

    Pages that the driver may move to the host do not count, and of an optimizer by its import path
    nothing is known: 0.
    """
    trained = [p for p in parameters if p.requires_grad]
    config = training.optimizer
    if isinstance(config, TargetOptimizerConfig):
        return 0
    if isinstance(config, AdamWConfig) and config.name.endswith("8bit"):
        paged = config.name.startswith("paged")
        return adam_8bit_bytes(trained, paged=paged).state_bytes
    if isinstance(config, AdamWConfig) and config.name == "paged-adamw":
        return 0
    return trace_optimizer(lambda weights: build_optimizer(weights, training), trained).state_bytes

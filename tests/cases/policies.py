"""Every policy that ships, and what the cases run under each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rematic
from rematic.memory import SimulatedProbe
from tests.activations.parity import Outcome, read_outcome

LOSSLESS = ("planned", "keep", "selective", "recompute", "recompute+offload", "offload")
"""Policies that promise the bits of the plain step."""


def attach(model: nn.Module, policy: str = "recompute", **options: Any) -> rematic.Session:
    """Attaches with a budget that is never near."""
    return rematic.attach(
        model, policy=policy, budget="4GiB", **{"probe": SimulatedProbe(), **options}
    )


def one_step(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    """Runs forward and backward of the sum of squares, or of the loss of a language model."""
    torch.manual_seed(11)
    output = model(*args, **kwargs)
    loss = output.loss if hasattr(output, "loss") else output.square().sum()
    loss.backward()
    return read_outcome(model, [loss])

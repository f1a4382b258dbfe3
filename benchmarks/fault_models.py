"""The models whose steps `fault_sweep.py` disturbs, with their batches and losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.activations import families
from tests.step_models import make_batches, make_tied_model


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batches and its loss."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    loss: Callable[[nn.Module, Any], torch.Tensor]


def _of_family(family: families.Family, build: Callable[[], nn.Module] | None = None) -> Workload:
    """Returns a family as a workload, built otherwise where that makes it smaller."""
    found = family if build is None else replace(family, build=build)

    def batches(number: int) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [found.batch(generator) for _ in range(number)]

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return found.build()

    return Workload(build=seeded, batches=batches, loss=found.loss)


TIED = "tied"
FAMILIES = {
    "mlp": _of_family(families.MLP),
    "batch-norm": _of_family(families.NORMS),
    "transformer-encoder": _of_family(
        families.ENCODER, functools.partial(families.Encoder, depth=2)
    ),
    "llama": _of_family(
        families.LLAMA_EAGER, functools.partial(families.build_llama, "eager", num_hidden_layers=2)
    ),
    "gpt2": _of_family(families.GPT2, functools.partial(families.build_gpt2, depth=2)),
}
"""In-place activations; running statistics and a spectral norm; attention with dropout and
padding; two language models of transformers."""
MODELS = {
    TIED: Workload(
        build=make_tied_model, batches=make_batches, loss=lambda model, batch: model(batch)
    ),
    **FAMILIES,
}
"""Dropout, running statistics, counters and a tied weight in one small model; and the families."""
TOKEN_WISE = {"llama": ("*.mlp",)}
"""Models with units that can run in slices of the sequence, and which those are; GPT-2's have
dropout, and the others no sequence or no token-wise module."""

"""The oracle of contract 1: a step's loss, gradients, buffers and RNG state, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rematic.activations import Engine
from rematic.policy import Keep, Plan, Recompute
from tests.activations.families import Batch, Family


@dataclass(kw_only=True)
class Outcome:
    """What steps leave behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    generator: torch.Tensor | None = None


def read_outcome(model: nn.Module, losses: Sequence[torch.Tensor]) -> Outcome:
    """Copies the outcome of steps that have just run."""
    return Outcome(
        losses=[loss.detach().clone() for loss in losses],
        gradients={
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        },
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        generator=torch.get_rng_state(),
    )


def differences(found: Outcome, wanted: Outcome) -> list[str]:
    """Names everything in which two outcomes differ by a single bit."""
    different = [
        f"loss {i}"
        for i, pair in enumerate(zip(found.losses, wanted.losses, strict=True))
        if not same_bits(*pair)
    ]
    assert found.gradients.keys() == wanted.gradients.keys()
    assert found.buffers.keys() == wanted.buffers.keys()
    for name, gradient in wanted.gradients.items():
        if not same_bits(found.gradients[name], gradient):
            different.append(f"gradient of {name}")
    for name, buffer in wanted.buffers.items():
        if not same_bits(found.buffers[name], buffer):
            different.append(f"buffer {name}")
    if not same_bits(found.generator, wanted.generator):
        different.append("RNG state")
    return different


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Compares bytes, so that -0.0 differs from 0.0 and NaN equals itself."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_as_bytes(a), _as_bytes(b))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def make(family: Family, seed: int = 0) -> nn.Module:
    """Builds the family's model, always with the same weights."""
    torch.manual_seed(seed)
    return family.build()


def batches(family: Family, number: int) -> list[Batch]:
    """Makes the family's first `number` batches, always the same."""
    generator = torch.Generator().manual_seed(5)
    return [family.batch(generator) for _ in range(number)]


def run_steps(
    model: nn.Module,
    family: Family,
    *,
    num_batches: int = 2,
    autocast: bool = False,
    before_backward: Callable[[], None] | None = None,
) -> Outcome:
    """Accumulates the gradients of several micro-batches; autocast covers the forward only."""
    torch.manual_seed(9)
    losses = []
    for batch in batches(family, num_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = family.loss(model, batch)
        if before_backward is not None:
            before_backward()
        loss.backward()
        losses.append(loss.detach())
    return read_outcome(model, losses)


@contextlib.contextmanager
def attached(
    model: nn.Module, *, kept: Sequence[bool] | bool = True, trusted: bool = False
) -> Iterator[Engine]:
    """Binds the model's units.

    `kept` says of each (or of all) whether its records start held; `trusted` leaves out the safety
    check of the first call, which replays one unit of each class.
    """
    engine = Engine(model)
    for unit in engine.units:
        unit.trusted = trusted
    flags = [kept] * len(engine.units) if isinstance(kept, bool) else kept
    engine.apply(Plan(actions=tuple(Keep() if flag else Recompute() for flag in flags)))
    try:
        yield engine
    finally:
        engine.detach()

"""What an optimizer holds, and what its step needs beside that."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from rematic.cost.event_log import EventLog
from rematic.cost.real_twins import RealTwins
from rematic.cost.torch_private import make_fake_mode

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer over the given weights, as the training will: `foreach`, `fused` or neither
decides what a step needs."""

_MEASURED_SIDE = 256
"""Weights are measured with as much of each side."""

_BLOCK_ELEMENTS = 256
_MIN_8BIT_ELEMENTS = 4096
_MIN_PAGED_ELEMENTS = 100_000
_CODE_BYTES = 2 * 256 * 4


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """The bytes of one optimizer over all trained weights."""

    state_bytes: int
    """Bytes of its state after the first step."""

    step_bytes: int
    """How far a step rises above weights, gradients and state, the first one or a later one."""


NO_OPTIMIZER = OptimizerBytes(state_bytes=0, step_bytes=0)
"""Steps nothing."""


def trace_optimizer(make: MakeOptimizer, parameters: Iterable[torch.Tensor]) -> OptimizerBytes:
    """Returns what an optimizer of torch needs, by two steps on fake tensors.

    Only distinct shapes are traced: what a step needs either grows with all weights (`foreach`) or
    is that of the largest (a loop), which two traces tell apart.

    Args:
        make: Makes the optimizer. Weights that it leaves out count nothing.
        parameters: All weights, of which those that need a gradient are trained; on any device.
    """
    trained = _trained(parameters)
    counts = Counter((tuple(p.shape), p.dtype) for p in trained)
    if not counts:
        return NO_OPTIMIZER
    once = _Steps(make, list(counts))
    twice = _Steps(make, [*counts, *counts])
    total_bytes = sum(p.numel() * p.element_size() for p in trained)
    growth = (twice.step_bytes - once.step_bytes) * (total_bytes - once.weight_bytes)
    return OptimizerBytes(
        state_bytes=sum(
            count * num_bytes
            for count, num_bytes in zip(counts.values(), once.state_bytes, strict=True)
        ),
        step_bytes=once.step_bytes + max(0, growth) // once.weight_bytes,
    )


def measure_optimizer(make: MakeOptimizer, parameters: Iterable[torch.Tensor]) -> OptimizerBytes:
    """Returns what any optimizer needs, by two real steps over small weights on the CPU.

    Of large weights it is taken to be as much for each element as of small ones.

    Args:
        make: Makes the optimizer.
        parameters: All weights, of which those that need a gradient are trained; on any device.
    """
    trained = _trained(parameters)
    counts = Counter((tuple(p.shape), p.dtype) for p in trained)
    if not counts:
        return NO_OPTIMIZER
    small = [(tuple(min(n, _MEASURED_SIDE) for n in shape), dtype) for shape, dtype in counts]
    once = _Steps(make, small, is_fake=False)
    twice = _Steps(make, [*small, *small], is_fake=False)
    shares = [
        math.prod(few) / math.prod(shape)
        for (shape, _), (few, _) in zip(counts, small, strict=True)
    ]
    by_all = twice.step_bytes - once.step_bytes > once.step_bytes / 2  # else of the largest alone
    scale = (
        sum(p.nbytes for p in trained) / once.weight_bytes
        if by_all
        else max(p.numel() for p in trained) / max(math.prod(few) for few, _ in small)
    )
    return OptimizerBytes(
        state_bytes=sum(
            round(count * num_bytes / share)
            for count, num_bytes, share in zip(
                counts.values(), once.state_bytes, shares, strict=True
            )
        ),
        step_bytes=round(once.step_bytes * scale),
    )


def _trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the weights that have a state; empty ones keep a count of steps at most."""
    return [p for p in parameters if p.requires_grad and p.numel()]


class _Steps:
    """The first two steps of an optimizer over weights of given shapes."""

    def __init__(
        self,
        make: MakeOptimizer,
        kinds: Sequence[tuple[tuple[int, ...], torch.dtype]],
        *,
        is_fake: bool = True,
    ) -> None:
        fake_mode = make_fake_mode() if is_fake else None
        twins = None if fake_mode is None else RealTwins(fake_mode)
        metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
        self.weight_bytes = sum(meta.nbytes for meta in metas)
        self.step_bytes = 0
        with fake_mode or contextlib.nullcontext():
            weights = [
                nn.Parameter(
                    torch.zeros_like(meta, device="cpu") if twins is None else twins.fake(meta)
                )
                for meta in metas
            ]
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            optimizer = make(weights)
            for _ in range(2):
                self._step(optimizer, weights, twins or contextlib.nullcontext())
            self.state_bytes = [_state_bytes(optimizer, weight) for weight in weights]

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        weights: list[nn.Parameter],
        twins: AbstractContextManager[object],
    ) -> None:
        log = EventLog()
        log.ignore([*weights, *(w.grad for w in weights if w.grad is not None)])
        log.ignore([t for w in weights for t in _state(optimizer, w)])
        log.cut("step")
        with twins, log:
            optimizer.step()
        log.end()
        (step,) = log.intervals
        # what is left is new state, which counts as such
        self.step_bytes = max(self.step_bytes, max(step.live_bytes, default=0) - step.end_bytes)


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(weight, {})
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _state_bytes(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _state(optimizer, weight))


def adam_8bit_bytes(parameters: Iterable[torch.Tensor], *, paged: bool) -> OptimizerBytes:
    """Returns what the 8-bit Adam of bitsandbytes needs (Dettmers et al. 2022, section 2).

    Two codes of one byte for each weight and two scales for each block of 256; weights with fewer
    than 4,096 elements have a state in float32. By what its source (0.50) does; not measured.

    Args:
        parameters: All weights, of which those that need a gradient are trained.
        paged: Whether codes of large weights are in memory that the driver moves to the host when
            the device is full, so that they do not count.
    """
    state = _CODE_BYTES
    for parameter in parameters:
        elements = parameter.numel()
        if not parameter.requires_grad:
            continue
        if elements < _MIN_8BIT_ELEMENTS:
            state += 2 * 4 * elements
            continue
        state += 2 * 4 * -(-elements // _BLOCK_ELEMENTS)
        if not (paged and elements >= _MIN_PAGED_ELEMENTS):
            state += 2 * elements
    return OptimizerBytes(state_bytes=state, step_bytes=0)


def paged_adam_bytes(parameters: Iterable[torch.Tensor]) -> OptimizerBytes:
    """Returns what the paged Adam of bitsandbytes needs in 32 bits: the state of small weights.

    Args:
        parameters: All weights, of which those that need a gradient are trained.
    """
    small = (p.numel() for p in parameters if p.requires_grad and p.numel() < _MIN_PAGED_ELEMENTS)
    return OptimizerBytes(state_bytes=2 * 4 * sum(small), step_bytes=0)

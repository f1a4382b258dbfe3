"""One way to optimize, for the Lightning runner and for plain loops alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rematic.recipes import TrainingConfig


def build_optimizer(parameters: Iterable[nn.Parameter], training: TrainingConfig) -> AdamW:
    """AdamW over what is trained; weight decay for matrices only.

    On a GPU it is the fused kernel, which needs no memory beyond its state.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        fused=True if any(p.is_cuda for p in trained) else None,
    )


def build_schedule(optimizer: Optimizer, training: TrainingConfig) -> LambdaLR:
    """The learning rate over optimizer steps: a linear rise, then constant."""
    warmup = training.warmup_steps
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> None:
    """Scales gradients down to a norm of `clip_norm` together; None leaves them."""
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Makes the state that the first step would make, without changing a weight.

    A memory limit over idle needs it: the state belongs to idle.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()

"""One way to optimize, for the Lightning runner and for plain loops alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rematic.recipes import (
    AdafactorConfig,
    AdamWConfig,
    SGDConfig,
    TargetOptimizerConfig,
    TrainingConfig,
)
from rematic.training.extras import import_extra
from rematic.training.import_target import import_target
from rematic.training.rates import rate_factor

_BITSANDBYTES = {
    "adamw-8bit": "AdamW8bit",
    "paged-adamw": "PagedAdamW",
    "paged-adamw-8bit": "PagedAdamW8bit",
}
"""Classes of `bitsandbytes.optim` by the name that a recipe gives them."""


def build_optimizer(
    parameters: Iterable[nn.Parameter], training: TrainingConfig, *, allow_code: bool = False
) -> Optimizer:
    """The optimizer over what is trained; weight decay for matrices only.

    On a GPU AdamW is the fused kernel, which needs no memory beyond its state.

    Args:
        parameters: The model's; frozen ones are left out.
        training: The training section of a recipe.
        allow_code: Whether `_target_` may name a class outside the allow-list.

    Raises:
        ValueError: The class that a recipe names cannot be used, or bitsandbytes is missing.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    build = _builder(training, trained, allow_code=allow_code)
    optimizer: Optimizer = build(
        [group for group in groups if group["params"]], lr=training.learning_rate
    )
    return optimizer


def _builder(
    training: TrainingConfig, trained: list[nn.Parameter], *, allow_code: bool
) -> Callable[..., Any]:
    config = training.optimizer
    if isinstance(config, AdamWConfig):
        return _adamw(config, trained)
    if isinstance(config, AdafactorConfig):
        decay, threshold = config.beta2_decay, config.clip_threshold
        return lambda groups, lr: Adafactor(groups, lr=lr, beta2_decay=decay, d=threshold)
    if isinstance(config, SGDConfig):
        momentum, nesterov = config.momentum, config.nesterov
        return lambda groups, lr: SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    return _target(config, allow_code=allow_code)


def _adamw(config: AdamWConfig, trained: list[nn.Parameter]) -> Callable[..., Any]:
    first, second = config.betas
    options: dict[str, Any] = {"betas": (first, second), "eps": config.eps}
    if config.name == "adamw":
        fused = True if any(p.is_cuda for p in trained) else None
        return lambda groups, lr: AdamW(groups, lr=lr, fused=fused, **options)
    optim = import_extra("bitsandbytes.optim", extra="bitsandbytes", needed_by=_key(config))
    kind = getattr(optim, _BITSANDBYTES[config.name])
    if config.name.startswith("paged") and not any(p.is_cuda for p in trained):
        # It says so itself, in every step, where a recipe is tried on a CPU.
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
    return lambda groups, lr: kind(groups, lr=lr, **options)


def _key(config: AdamWConfig) -> str:
    return f"training.optimizer: {config.name}"


def _target(config: TargetOptimizerConfig, *, allow_code: bool) -> Callable[..., Any]:
    key = "training.optimizer._target_"
    kind = import_target(config._target_, base=Optimizer, key=key, allow_code=allow_code)

    def build(groups: list[dict[str, Any]], lr: float) -> Any:  # noqa: ANN401 - any optimizer
        try:
            return kind(groups, lr=lr, **config.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(_misfit(config, error)) from error

    return build


def _misfit(config: TargetOptimizerConfig, error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    given = f" with the options {dict(config.options)}" if config.options else ""
    return (
        f"training.optimizer: {config._target_}{given} cannot train this recipe "
        f"({type(error).__name__}: {text}); expected an optimizer of matrices and vectors, in "
        "groups of their own weight decay, that steps by gradients alone, and options that it takes"
    )


def check_optimizer(
    training: TrainingConfig,
    *,
    allow_code: bool,
    has_vectors: bool = True,
    device: torch.device | None = None,
) -> None:
    """Builds the optimizer over a matrix and a vector, before anything is loaded.

    One that is named by its import path also takes a step.

    Args:
        training: The training section of a recipe.
        allow_code: Whether `_target_` may name a class outside the allow-list.
        has_vectors: Whether vectors are trained too; adapters have matrices only.
        device: Where it is trained; None: on the CPU.

    Raises:
        ValueError: As `build_optimizer`, or the optimizer cannot take a step.
    """
    shapes = ((2, 2), (2,)) if has_vectors else ((2, 2),)
    weights = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    optimizer = build_optimizer(weights, training, allow_code=allow_code)
    if not isinstance(training.optimizer, TargetOptimizerConfig):
        return
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    try:
        optimizer.step()
    except Exception as error:  # of whatever class it is
        raise ValueError(_misfit(training.optimizer, error)) from error


def restate_rates(optimizer: Optimizer, schedule: LambdaLR, training: TrainingConfig) -> None:
    """Lets rate and weight decay be those of the recipe, not those that a checkpoint brought.

    Args:
        optimizer: One that `build_optimizer` made, after its state was loaded.
        schedule: Its schedule, likewise; its position stays.
        training: The training section of the recipe that is trained on.
    """
    rate, step = training.learning_rate, schedule.last_epoch
    schedule.base_lrs = [rate] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(step)
        is_matrices = any(p.ndim >= 2 for p in group["params"])
        group["weight_decay"] = training.weight_decay if is_matrices else 0.0


def build_schedule(
    optimizer: Optimizer, training: TrainingConfig, *, total_steps: int | None = None
) -> LambdaLR:
    """The learning rate over optimizer steps: a linear rise, then what the schedule says.

    Args:
        optimizer: Whose rate it is.
        training: The training section of a recipe.
        total_steps: Optimizer steps in all; a schedule that falls needs them.
    """
    return LambdaLR(
        optimizer,
        lambda step: rate_factor(
            step,
            schedule=training.schedule,
            warmup_steps=training.warmup_steps,
            total_steps=total_steps,
            final_share=training.final_share,
        ),
    )


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> None:
    """Scales gradients down to a norm of `clip_norm` together; None leaves them."""
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Makes the state that the first step would make, without changing a weight.

    A memory limit over idle needs it: the state belongs to idle.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0  # SGD adds decay to what it keeps
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (rate, decay) in zip(optimizer.param_groups, before, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for state in optimizer.state.values():
        step = state.get("step")  # SGD counts none
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:  # a number in bitsandbytes
            state["step"] = 0

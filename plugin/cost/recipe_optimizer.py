"""What the optimizer of a recipe holds and needs, without weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from rematic.cost.optimizer_bytes import (
    MakeOptimizer,
    OptimizerBytes,
    adam_8bit_bytes,
    measure_optimizer,
    paged_adam_bytes,
    trace_optimizer,
)
from rematic.recipes import (
    AdafactorConfig,
    AdamWConfig,
    SGDConfig,
    TargetOptimizerConfig,
    TrainingConfig,
)
from rematic.training.import_target import ALLOWED_MODULES, import_target

_TORCH = "torch.optim"
_Rule = Callable[[Iterable[torch.Tensor]], OptimizerBytes]
_RULES_OF_BITSANDBYTES: dict[str, _Rule] = {
    "adamw-8bit": partial(adam_8bit_bytes, paged=False),
    "paged-adamw-8bit": partial(adam_8bit_bytes, paged=True),
    "paged-adamw": paged_adam_bytes,
}
_CLASSES_OF_BITSANDBYTES = {
    **dict.fromkeys(("AdamW8bit", "Adam8bit"), "adamw-8bit"),
    **dict.fromkeys(("PagedAdamW8bit", "PagedAdam8bit"), "paged-adamw-8bit"),
    **dict.fromkeys(("PagedAdamW", "PagedAdam", "PagedAdamW32bit"), "paged-adamw"),
}


def recipe_optimizer_bytes(
    training: TrainingConfig,
    weights: Sequence[torch.Tensor],
    *,
    on_accelerator: bool,
    allow_code: bool = False,
) -> OptimizerBytes:
    """Returns what an optimizer needs: by rule, by two steps on fake tensors, or by real ones.

    Args:
        training: What a recipe says of it.
        weights: All weights or, where they are sharded, the parts that one process holds.
        on_accelerator: Whether it runs on one, where AdamW is fused.
        allow_code: Whether `_target_` may name a class outside the allow-list.

    Raises:
        ValueError: If an optimizer that is named by its import path cannot be used.
    """
    chosen = training.optimizer
    if isinstance(chosen, AdamWConfig) and chosen.name in _RULES_OF_BITSANDBYTES:
        return _RULES_OF_BITSANDBYTES[chosen.name](weights)
    make: MakeOptimizer
    if isinstance(chosen, AdamWConfig):
        make = partial(torch.optim.AdamW, fused=True if on_accelerator else None)
    elif isinstance(chosen, AdafactorConfig):
        make = torch.optim.Adafactor
    elif isinstance(chosen, SGDConfig):
        make = partial(torch.optim.SGD, lr=1e-3, momentum=chosen.momentum, foreach=on_accelerator)
    else:
        return _by_path(chosen, weights, on_accelerator=on_accelerator, allow_code=allow_code)
    return trace_optimizer(make, weights)


def _by_path(
    chosen: TargetOptimizerConfig,
    weights: Sequence[torch.Tensor],
    *,
    on_accelerator: bool,
    allow_code: bool,
) -> OptimizerBytes:
    """What an optimizer that is named by its import path needs."""
    path, key = chosen._target_, "training.optimizer._target_"
    package, _, name = path.rpartition(".")
    if package.startswith("bitsandbytes") and name in _CLASSES_OF_BITSANDBYTES:
        return _RULES_OF_BITSANDBYTES[_CLASSES_OF_BITSANDBYTES[name]](weights)
    if package not in ALLOWED_MODULES and not allow_code:
        raise ValueError(
            f"nothing is known of the state of {path}: expected an optimizer of "
            f"{' or '.join(ALLOWED_MODULES)}. Name the one nearest to it, such as "
            "training.optimizer=adamw."
        )
    found = import_target(path, base=torch.optim.Optimizer, key=key, allow_code=allow_code)
    options = dict(chosen.options)
    may_choose = "foreach" in inspect.signature(found).parameters and "fused" not in options
    if on_accelerator and package == _TORCH and may_choose:
        options.setdefault("foreach", True)  # as torch chooses there by itself
    make = partial(found, **options)
    try:
        if package == _TORCH:
            with contextlib.suppress(ArithmeticError, RuntimeError, TypeError):
                return trace_optimizer(make, weights)  # some read numbers that fakes do not have
        return measure_optimizer(make, weights)
    except Exception as error:  # of whatever class it is
        text = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{key} is {path!r}, which cannot take a step over the trained weights "
            f"({type(error).__name__}: {text}); expected an optimizer of matrices and vectors: "
            "name another one, such as training.optimizer=adamw"
        ) from error


def parts_of(weights: Sequence[torch.Tensor], num_parts: int) -> list[nn.Parameter]:
    """Returns, without values, the part of each trained weight that one of so many holds."""
    return [
        nn.Parameter(
            torch.empty(
                -(-weight.shape[0] // num_parts) if weight.dim() else 1,
                *weight.shape[1:],
                dtype=weight.dtype,
                device="meta",
            )
        )
        for weight in weights
        if weight.requires_grad
    ]

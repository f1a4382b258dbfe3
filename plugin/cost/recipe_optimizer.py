"""What the optimizer of a recipe holds and needs, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from rematic.cost.optimizer_bytes import (
    MakeOptimizer,
    OptimizerBytes,
    adam_8bit_bytes,
    paged_adam_bytes,
    trace_optimizer,
)
from rematic.recipes import AdafactorConfig, AdamWConfig, SGDConfig, TrainingConfig
from rematic.training.import_target import import_target

_TORCH = "torch.optim."
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
    training: TrainingConfig, weights: Sequence[torch.Tensor], *, on_accelerator: bool
) -> OptimizerBytes:
    """Returns what an optimizer needs: by two steps on fake tensors, or by rule.

    Args:
        training: What a recipe says of it.
        weights: All weights or, where they are sharded, the parts that one process holds.
        on_accelerator: Whether it runs on one, where AdamW is fused.

    Raises:
        ValueError: If nothing is known of an optimizer that is named by its import path.
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
        path = chosen._target_
        package, _, name = path.rpartition(".")
        if package.startswith("bitsandbytes") and name in _CLASSES_OF_BITSANDBYTES:
            return _RULES_OF_BITSANDBYTES[_CLASSES_OF_BITSANDBYTES[name]](weights)
        make = _of_torch(path, chosen.options)
    return trace_optimizer(make, weights)


def _of_torch(path: str, options: Mapping[str, object]) -> MakeOptimizer:
    if not path.startswith(_TORCH):
        raise ValueError(
            f"nothing is known of the state of {path}: expected an optimizer of torch.optim or an "
            "Adam of bitsandbytes. Name the one nearest to it, such as training.optimizer=adamw."
        )
    key = "training.optimizer._target_"
    found = import_target(path, base=torch.optim.Optimizer, key=key, allow_code=False)
    return partial(found, **options)


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

"""What a model holds before it has trained, and budgets too small for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rematic.byte_sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a model holds before it has trained."""

    num_parameters: int
    """Numbers in its parameters, each counted once."""
    num_trainable: int
    """Those of them that are trained."""
    weight_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    """Bytes of the gradients of one step."""
    optimizer_bytes: int
    """Bytes of the optimizer's state."""

    @property
    def total_bytes(self) -> int:
        """Weights, gradients and optimizer state together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def size_of(module: nn.Module, *, optimizer_bytes: int | None = None) -> ModelSize:
    """The size of a model that exists; shared parameters count once.

    Args:
        module: The model, on any device.
        optimizer_bytes: Of the optimizer's state; None: that of AdamW, two numbers for each that
            is trained.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    gradient_bytes = sum(p.nbytes for p in trainable)
    return ModelSize(
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_trainable=sum(p.numel() for p in trainable),
        weight_bytes=sum(t.nbytes for t in [*module.parameters(), *module.buffers()]),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=2 * gradient_bytes if optimizer_bytes is None else optimizer_bytes,
    )


def check_budget(size: ModelSize, *, budget_bytes: int) -> None:
    """Refuses a budget in which no step fits, whatever happens to the activations.

    Raises:
        ValueError: The budget does not even hold the weights, or not what an optimizer step needs.
    """
    if budget_bytes < size.weight_bytes:
        problem = f"the model's own weights ({format_bytes(size.weight_bytes)})"
    elif budget_bytes < size.total_bytes:
        problem = (
            f"weights, gradients and optimizer state ({format_bytes(size.weight_bytes)} + "
            f"{format_bytes(size.gradient_bytes)} + {format_bytes(size.optimizer_bytes)})"
        )
    else:
        return
    raise ValueError(
        f"memory.budget is {format_bytes(budget_bytes)}, which is smaller than {problem}; "
        f"expected more than {format_bytes(size.total_bytes)}, and activations come on top: "
        "raise memory.budget or make the model smaller"
    )

"""What the optimizer of a recipe will hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rematic.cost.recipe_optimizer import recipe_optimizer_bytes
from rematic.recipes import TrainingConfig


def optimizer_state_bytes(
    parameters: Iterable[nn.Parameter], training: TrainingConfig, *, allow_code: bool = False
) -> int:
    """Bytes of the state over weights on any device, `meta` included.

    Pages that the driver may move to the host do not count.

    Args:
        parameters: The model's; frozen ones count nothing.
        training: The training section of a recipe.
        allow_code: Whether `_target_` may name a class outside the allow-list.

    Raises:
        ValueError: An optimizer that is named by its import path cannot be used.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return recipe_optimizer_bytes(
        training, trained, on_accelerator=False, allow_code=allow_code
    ).state_bytes

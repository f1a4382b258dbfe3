"""Units that are compiled: records stay outside of what the compiler sees.

A unit may be compiled by `module.compile()` or `torch.compile(module)`, before or after attaching.
The code of rematic is never compiled, so a compiled region that comes to it ends there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rematic.activations import torch_private
from rematic.activations.wrappers import COMPILED

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_RIGHT = (
    "Compile the units instead, before or after attaching: "
    "`for block in model.model.layers: block.compile()`."
)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls of `module` itself run compiled code."""
    return COMPILED in module._modules or torch_private.compiled_call(module) is not None


def refuse_compiled_around(model: nn.Module, units: Collection[str]) -> None:
    """Refuses a model that is compiled around its units, and a setting without effect.

    Raises:
        ValueError: If the model or a part of it that holds units is compiled, or torch's own budget
            for activations is set although nothing is compiled.
    """
    for name in sorted({prefix for unit in units for prefix in _above(unit)}):
        if is_compiled(model.get_submodule(name)):
            raise ValueError(
                f"{name or 'the model'} is compiled as a whole: expected compiled units at most, "
                f"since a compiled region hides what its units save. {_RIGHT}"
            )
    share = torch_private.activation_memory_budget()
    if share < 1 and not any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            f"torch's activation_memory_budget is {share}, but nothing is compiled, so it has no "
            "effect: expected 1, its default. Leave it to `memory.budget`, or compile the units "
            "(`for block in model.model.layers: block.compile()`)."
        )


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def uncompiled(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one call of a unit that a compiled region has come to, without the compiler.

    A replay in backward will run outside of that region, and must do the same.
    """
    unit.note_once(f"a compiled region around it ends here, and it runs uncompiled. {_RIGHT}")
    return torch.compiler.disable(unit.call)(args, kwargs)  # type: ignore[no-untyped-call] # torch 2.13

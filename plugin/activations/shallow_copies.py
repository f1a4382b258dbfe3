"""Tells through which module a `forward` that stands on an instance was called.

A shallow copy of a module (`copy.copy`, the replicas of `torch.nn.parallel.replicate`) takes the
attributes of the instance along, and so a `forward` that belongs to the module it was copied from.
Python does not tell the callable through which of them it was reached; the frame of the call does.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from rematic.activations import torch_private


def shallow_copy_called(module: nn.Module | None) -> nn.Module | None:
    """Returns the shallow copy through which the caller of this function was called.

    Args:
        module: The module that the caller stands on, None if that is gone.

    Returns:
        None where it was `module` itself, or where it cannot be told: `copy.forward(x)` instead of
        `copy(x)`.
    """
    frame: Any = sys._getframe(2)
    if frame.f_code not in torch_private.CALLS_OF_MODULES:
        return None
    called: nn.Module | None = frame.f_locals.get("self")
    return None if called is module else called


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the bound `forward` of a module's class."""
    return types.MethodType(type(module).forward, module)


def forward_of_copy(copied: nn.Module, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns the `forward` of a shallow copy.

    Args:
        copied: The copy.
        previous: What stood on the instance before, None for nothing. What somebody else put there
            is bound to the module that it was put on; the copy would call it too.
    """
    if previous is None:
        return plain_forward(copied)
    ours: Callable[..., Callable[..., Any]] | None = getattr(previous, "forward_of_copy", None)
    return previous if ours is None else ours(copied)

"""Modules that do nothing but wrap another one."""

from __future__ import annotations

from torch import nn

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Where `checkpoint_wrapper` and `offload_wrapper` of torch.distributed keep the module."""
COMPILED = "_orig_mod"
"""Where `torch.compile(module)` keeps it."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that the wrappers around it are about."""
    for name in (CHECKPOINTED, COMPILED):
        inside = module._modules.get(name)
        if inside is not None:
            return unwrapped(inside)
    return module

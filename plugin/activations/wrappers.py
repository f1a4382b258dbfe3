"""Modules that do nothing but wrap another one."""

from __future__ import annotations

from torch import nn

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Where `checkpoint_wrapper` and `offload_wrapper` of torch.distributed keep the module."""
COMPILED = "_orig_mod"
"""Where `torch.compile(module)` keeps it."""
SHARDED = "_fsdp_wrapped_module"
"""Where `FullyShardedDataParallel` keeps it."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that the wrappers around it are about."""
    for name in (CHECKPOINTED, COMPILED):
        inside = module._modules.get(name)
        if inside is not None:
            return unwrapped(inside)
    return module


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class; `fully_shard` has put one of its own before it."""
    cls = type(unwrapped(module))
    if [base.__name__ for base in cls.__bases__[:1]] == ["FSDPModule"]:
        cls = cls.__bases__[1]
    return cls.__name__


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Returns the module that a qualified name leads to now, None if there is none any more.

    A wrapper of FSDP is passed through: it gathers weights around the module, which a replay,
    alone on its rank, must not do.
    """
    module: nn.Module | None = model
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
        while module is not None and SHARDED in module._modules:
            module = module._modules[SHARDED]
    return module


def without_wrappers(name: str) -> str:
    """Returns the qualified name of the outermost wrapper of what a name leads to."""
    while name.endswith((f".{CHECKPOINTED}", f".{COMPILED}")):
        name = name.rpartition(".")[0]
    return name

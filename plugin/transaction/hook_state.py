"""Hooks on modules and parameters: one that a failed attempt has registered must not stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn

Hooks: TypeAlias = dict[int, Any]
"""As torch keeps them: by the number of their handle."""

_OF_MODULES = tuple(
    name
    for name, value in vars(nn.Module()).items()
    if isinstance(value, dict) and "_hooks" in name and "state_dict" not in name
)
_hooks_of: Any = itemgetter(*_OF_MODULES)
_OF_ALL_MODULES = tuple(
    value
    for name, value in vars(torch.nn.modules.module).items()
    if isinstance(value, dict) and name.startswith("_global_") and "hooks" in name
)
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookState:
    """The hooks that stand on modules and parameters at one moment, rematic's own left out.

    Args:
        modules: The modules, each by itself.
        parameters: The parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
        self._modules = [module.__dict__ for module in modules]
        self._parameters = list(parameters)
        # mostly there are none, so what is not in here had none
        self._before = {id(hooks): dict(hooks) for hooks in self._places() if hooks}

    def restore(self) -> None:
        """Leaves the hooks that there were, in their order."""
        for hooks in self._places():
            before = self._before.get(id(hooks), {})
            if hooks.keys() != before.keys():
                ours = {n: hook for n, hook in hooks.items() if _is_ours(hook)}
                theirs = {n: hook for n, hook in before.items() if not _is_ours(hook)}
                hooks.clear()
                hooks.update({**theirs, **ours})

    def _places(self) -> Iterator[Hooks]:
        yield from _OF_ALL_MODULES
        for home in self._modules:
            yield from _hooks_of(home)
        for parameter in self._parameters:
            for name in _OF_PARAMETERS:
                hooks = getattr(parameter, name, None)
                if hooks is not None:
                    yield hooks


def _is_ours(hook: Any) -> bool:  # noqa: ANN401 - whatever was registered
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "rematic"

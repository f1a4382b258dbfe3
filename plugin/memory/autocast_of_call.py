"""Autocast as the caller of an op has it, for dispatch modes.

Torch switches autocast off while a `TorchDispatchMode` handles an op (torch 2.13). Ops of torch do
not mind, since autocast has cast their arguments before; ops of other packages may: bitsandbytes
writes its 4-bit product in Python, over a linear layer that autocast casts. With a mode around the
step it would compute in another dtype than without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_OF_TORCH = frozenset({"aten", "prim", "prims"})
_NOTHING = contextlib.nullcontext()
# private: the state at the entry into the dispatcher, which the guard puts back
_StateAtEntry: Any = getattr(torch._C, "_RestorePythonTLSSnapshot", None)


def autocast_of_call(func: Any) -> contextlib.AbstractContextManager[object]:  # noqa: ANN401 - an op of the dispatcher
    """Switches autocast on in the body where it was on when `func` was called.

    For the handler of a dispatch mode, around the call of the op that it handles.

    Args:
        func: The op; nothing is done for those of torch.
    """
    if _is_of_torch(func) or _StateAtEntry is None:
        return _NOTHING
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with _StateAtEntry():
        enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return _switched_on(enabled) if enabled else _NOTHING


@functools.cache
def _is_of_torch(func: Any) -> bool:  # noqa: ANN401 - an op of the dispatcher
    return func.namespace in _OF_TORCH


@contextlib.contextmanager
def _switched_on(kinds: list[str]) -> Iterator[None]:
    before = [(kind, torch.is_autocast_enabled(kind)) for kind in kinds]
    for kind in kinds:
        torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind, enabled in before:
            torch.set_autocast_enabled(kind, enabled)

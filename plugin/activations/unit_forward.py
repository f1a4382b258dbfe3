"""The callable that stands on a module in the place of its `forward`."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rematic.activations import torch_private
from rematic.activations.compiled import uncompiled
from rematic.activations.replay import replaying
from rematic.activations.shallow_copies import (
    forward_of_copy,
    plain_forward,
    shallow_copy_called,
)

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_log = logging.getLogger("rematic")
recording_state = threading.local()
"""Of this thread: `recording`, while a unit's forward runs."""


class UnitForward:
    """The callable that stands in for a unit's `forward`, or for its compiled call.

    It knows the module weakly, so that attaching makes no new reference cycle, and it copies and
    pickles into the plain bound method: a copy of an attached model is plain. A shallow copy of the
    module (`copy.copy`, a replica of `nn.DataParallel`) holds this very object, which then runs the
    forward of the copy.
    """

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self._unit = unit
        self._module = weakref.ref(module)
        compiled = torch_private.compiled_call(module) is not None
        self._slot = torch_private.COMPILED_CALL if compiled else "forward"
        self._previous: Callable[..., Any] | None = module.__dict__.get(self._slot)
        self.is_around_hooks = compiled
        """Whether the module's own hooks run inside of it."""
        self.silent = False
        """Whether it was taken away while somebody else had wrapped it: it then does nothing."""
        functools.update_wrapper(self, type(module).forward)
        module.__dict__[self._slot] = self

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own `forward`, without `self`."""
        return inspect.signature(self._previous or self._bound())

    def remove(self) -> None:
        """Takes itself from the instance, or goes silent if somebody wrapped it meanwhile."""
        module = self._module()
        if module is None:
            return
        if module.__dict__.get(self._slot) is not self:
            _log.warning(
                "forward of unit %r was replaced after attach; rematic's part of it now does "
                "nothing. Detach in the reverse order of attaching to remove it.",
                self._unit.name,
            )
        elif self._previous is None:
            del module.__dict__[self._slot]
        else:
            module.__dict__[self._slot] = self._previous
        self.silent = True

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what `forward` was before."""
        forward = self._bound() if self._previous is None else self._previous
        return forward(*args, **kwargs)

    def _bound(self) -> Callable[..., Any]:
        module = self._module()
        assert module is not None, "forward is only called through its module"
        return plain_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the unit under its record, or plainly where nothing will be saved or replayed."""
        compiling = torch.compiler.is_compiling()
        copied = None if compiling else shallow_copy_called(self._module())
        if copied is not None:
            self._unit.note_once("not managed in a shallow copy of it, which runs as it is")
            return self.forward_of_copy(copied)(*args, **kwargs)
        if (
            self.silent
            or not torch.is_grad_enabled()
            or compiling
            # a unit called from inside another one: its tensors belong to the outer record
            or is_recording()
            or replaying()
        ):
            return self.original(*args, **kwargs)
        reason = _pass_through_reason()
        if reason is not None:
            self._unit.note_once(f"not managed in this call: {reason}")
            return self.original(*args, **kwargs)
        if torch_private.inside_compiled_region():
            return uncompiled(self._unit, args, kwargs)
        return self._unit.call(args, kwargs)

    def forward_of_copy(self, copied: nn.Module) -> Callable[..., Any]:
        """Returns what `forward` of a shallow copy is without rematic."""
        return forward_of_copy(copied, self._previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the plain `forward` of the copy."""
        if self._previous is not None:
            return copy.deepcopy(self._previous, memo)
        copied: Any = copy.deepcopy(self._unit.module, memo)  # mostly in the memo already
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the plain `forward` of the module."""
        if self._previous is not None:
            return _same, (self._previous,)
        return getattr, (self._module(), "forward")


def is_recording() -> bool:
    """Returns whether a unit's forward runs in this thread."""
    return getattr(recording_state, "recording", False)


def _pass_through_reason() -> str | None:
    if torch_private.inside_function_transform():
        return "torch.func transforms refuse saved-tensor hooks"
    if torch_private.saved_tensor_hooks_are_refused():
        return "disable_saved_tensors_hooks is open around it"
    if torch_private.inside_forward_ad():
        return "the tangents of forward-mode differentiation are not there in a replay"
    if torch_private.parametrizations_are_cached():
        return "parametrize.cached() shares tensors between calls, which a replay would not find"
    if torch_private.is_capturing_graph():
        return "a CUDA graph is being captured, which would replay without rematic"
    if torch_private.has_outer_saved_tensor_hooks():
        return (
            "other saved-tensor hooks are active around it (save_on_cpu, activation offloading); "
            "turn them off to let rematic manage this unit"
        )
    return None


def _same(value: Any) -> Any:
    return value

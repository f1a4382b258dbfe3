"""Wraps the `forward` of one module on the instance, and puts back what was there."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from rematic.activations.shallow_copies import (
    forward_of_copy,
    plain_forward,
    shallow_copy_called,
)

_log = logging.getLogger("rematic")


class InstanceForward:
    """Stands in for the `forward` of one module, whose class and names stay as they are.

    It knows the module weakly, shows the signature of what it stands for (hosts read the names of
    the arguments), and copies and pickles into the plain `forward`.

    Args:
        module: The module.
        around: Called with `forward` as it was, then with the arguments of the call.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._around = around
        self._previous: Callable[..., Any] | None = module.__dict__.get("forward")
        self._active = True
        functools.update_wrapper(self, type(module).forward)
        # As an entry of the instance: nn.Module's own __setattr__ is for parameters and modules.
        module.__dict__["forward"] = self

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of `forward`, without `self`."""
        return inspect.signature(self._original())

    def known_module(self) -> nn.Module | None:
        """Returns the module, None if it is gone."""
        return self._module()

    def remove(self) -> None:
        """Takes itself away, or goes silent under somebody's wrapper; safe to call twice."""
        module, was_active = self._module(), self._active
        self._active = False
        if module is None or not was_active:
            return
        if module.__dict__.get("forward") is not self:
            _log.warning(
                "forward of %s was wrapped by somebody else meanwhile; rematic's part of it now "
                "does nothing. Remove wrappers in the reverse order to take it away.",
                type(module).__name__,
            )
        elif self._previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `around` with `forward` and the arguments; a shallow copy runs its own."""
        copied = shallow_copy_called(self._module())
        if copied is not None:
            return self.forward_of_copy(copied)(*args, **kwargs)
        original = self._original()
        return (
            self._around(original, *args, **kwargs) if self._active else original(*args, **kwargs)
        )

    def forward_of_copy(self, copied: nn.Module) -> Callable[..., Any]:
        """Returns what `forward` of a shallow copy is without rematic."""
        return forward_of_copy(copied, self._previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the plain `forward` of the copy."""
        return copy.deepcopy(self._original(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the plain `forward` of the module."""
        if self._previous is not None:
            return _same, (self._previous,)
        return getattr, (self._module(), "forward")

    def _original(self) -> Callable[..., Any]:
        if self._previous is not None:
            return self._previous
        module = self._module()
        assert module is not None, "forward is only called through its module"
        return plain_forward(module)


def _same(value: Any) -> Any:
    return value

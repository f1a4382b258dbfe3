"""Wraps an optimizer's `step` on the instance: a boundary lies after it, a retry around it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]
"""Forward and backward, as an optimizer's step takes them; what it returns is passed through."""


class OptimizerBoundary:
    """Tells the session when an optimizer has stepped, and covers the step by the op retry.

    Args:
        optimizer: The optimizer, whose class stays as it is.
        guard: Makes the context in which parameters and state are updated.
        on_step: Called after the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        guard: Callable[[], contextlib.AbstractContextManager[object]],
        on_step: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._guard = guard
        self._on_step = on_step
        self._previous = optimizer.__dict__.get("step")
        self._original: Callable[..., object] = optimizer.step
        self._active = True
        # Bound: learning-rate schedulers wrap `optimizer.step.__func__` on the instance too.
        self._wrapped = types.MethodType(self._make_step(), optimizer)
        optimizer.step = self._wrapped  # type: ignore[method-assign]

    def detach(self) -> None:
        """Gives the optimizer its own `step` back, or goes silent under somebody's wrapper."""
        self._active = False
        if self._optimizer.__dict__.get("step") is self._wrapped:
            if self._previous is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.__dict__["step"] = self._previous

    def _make_step(self) -> Callable[..., object]:
        # With its marks: schedulers warn where theirs is gone, scalers read the signature.
        @functools.wraps(getattr(self._original, "__func__", self._original))
        def step(
            _: torch.optim.Optimizer, closure: Closure | None = None, **kwargs: object
        ) -> object:
            if not self._active:
                return self._call(closure, kwargs)
            guard: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            if not isinstance(self._optimizer, torch.optim.LBFGS):  # it calls its closure often
                closure, guard = _evaluated(closure), self._guard()
            with guard:
                result = self._call(closure, kwargs)
            self._on_step()
            return result

        return step

    def _call(self, closure: Closure | None, kwargs: dict[str, object]) -> object:
        return self._original(**kwargs) if closure is None else self._original(closure, **kwargs)


def _evaluated(closure: Closure | None) -> Closure | None:
    """Runs forward and backward first: the guard is for the update alone."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss

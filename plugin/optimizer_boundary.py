"""Wraps an optimizer's `step` on the instance: a boundary lies after it, a retry around it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from rematic.activations import OpRetry, StepMeter
from rematic.memory import is_out_of_memory
from rematic.torn_step import OptimizerState
from rematic.transaction import num_ranks

Closure = Callable[[], Any]
"""Forward and backward, as an optimizer's step takes them; what it returns is passed through."""

TornStep = Callable[[torch.optim.Optimizer, list[torch.Tensor], RuntimeError], BaseException]
"""Makes an error of an optimizer, the parameters it has changed, and what failed."""

FailedStep = Callable[[RuntimeError], BaseException | None]
"""Makes an error of what failed before an optimizer has changed anything; None lets it pass."""


class OptimizerGuard:
    """Covers an update of parameters and state; may be left and entered again.

    Args:
        retry: The retry at the op, None for none.
        meter: The meter of a step that is open around the update (manual optimization), which
            must not take the optimizer's memory for the working set of backward.
    """

    def __init__(self, retry: OpRetry | None, meter: StepMeter | None) -> None:
        self._retry = retry
        self._meter = meter
        self.has_closure_failed = False
        """Whether what was raised comes from forward and backward, inside the step."""

    def __enter__(self) -> None:
        """Stops the meter and puts the retry in force."""
        if self._meter is not None:
            self._meter.paused = True
        if self._retry is not None:
            self._retry.__enter__()  # type: ignore[no-untyped-call] # torch 2.13

    def __exit__(self, *error: object) -> None:
        """Takes the retry out of force and lets the meter go on."""
        if self._retry is not None:
            self._retry.__exit__(*error)  # type: ignore[no-untyped-call] # torch 2.13
        if self._meter is not None:
            self._meter.paused = False


class OptimizerBoundary:
    """Tells the session when an optimizer has stepped, and covers the step by the op retry.

    Args:
        optimizer: The optimizer, whose class stays as it is.
        guard: Makes the context in which the optimizer updates parameters and state.
        on_step: Called after the step.
        on_torn: Makes the error that is raised when the step ran out of memory half way; called
            with the optimizer, what it has changed and the failure. None: the failure passes.
        on_failed: Makes the error that is raised when it ran out of memory before it had changed
            anything; called with the failure. None: the failure passes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        guard: Callable[[torch.optim.Optimizer], OptimizerGuard],
        on_step: Callable[[], None],
        on_torn: TornStep | None = None,
        on_failed: FailedStep | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._on_failed = on_failed
        self._on_torn = on_torn
        self._guard = guard
        self._on_step = on_step
        self._previous = optimizer.__dict__.get("step")
        self._original: Callable[..., object] = optimizer.step
        self._active = True
        # Bound: learning-rate schedulers wrap `optimizer.step.__func__` on the instance too.
        self._wrapped = types.MethodType(self._make_step(), optimizer)
        optimizer.step = self._wrapped  # type: ignore[method-assign]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._optimizer

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
            guard, before = self._guard(self._optimizer), OptimizerState(self._optimizer)
            try:
                with guard:
                    result = self._call(closure and _outside(guard, closure), kwargs)
            except RuntimeError as error:
                stop = self._stop(before, error, of_closure=guard.has_closure_failed)
                if stop is None:
                    raise
                # without its cause: an out-of-memory error would be answered as one
                raise stop from None
            self._on_step()
            return result

        return step

    def _stop(
        self, before: OptimizerState, error: RuntimeError, *, of_closure: bool
    ) -> BaseException | None:
        if not is_out_of_memory(error):
            return None
        changed = before.changed()
        # other ranks may have made this step: nobody may skip it here and go on
        if changed or num_ranks() > 1:
            on_torn = self._on_torn
            return None if on_torn is None else on_torn(self._optimizer, changed, error)
        on_failed = None if of_closure else self._on_failed
        return None if on_failed is None else on_failed(error)

    def _call(self, closure: Closure | None, kwargs: dict[str, object]) -> object:
        return self._original(**kwargs) if closure is None else self._original(closure, **kwargs)


def _outside(guard: OptimizerGuard, closure: Closure) -> Closure:
    """Takes forward and backward out of the guard, as often as the optimizer asks for them.

    (Once before the step would do for Adam; LBFGS and sharpness-aware optimizers change the
    parameters between two calls.)
    """

    def outside() -> object:
        guard.__exit__(None, None, None)
        try:
            return closure()
        except BaseException:
            guard.has_closure_failed = True
            raise
        finally:
            guard.__enter__()

    return outside

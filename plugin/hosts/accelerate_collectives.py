"""What ranks exchange through an Accelerator inside a step: once, however often the step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rematic.activations.kept_values import copied
from rematic.hosts.instance_method import InstanceMethod
from rematic.transaction import ForeignCollectives

_METHODS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")


class ExchangedOnce:
    """Answers a repeated call with what the first one returned, without the other ranks.

    A step that runs again on one rank has the same tensors to exchange, and the others do not wait
    for them a second time. Trainers gather their metrics so.

    Args:
        accelerator: The Accelerator, whose methods are wrapped until `close`.
        collectives: Where these calls are answered for.
    """

    def __init__(
        self,
        accelerator: Any,  # noqa: ANN401 - accelerate ships no types
        collectives: ForeignCollectives,
    ) -> None:
        self._collectives = collectives
        self._results: list[tuple[str, Any]] = []
        self._next = 0
        self._is_inside = False
        self._seams = [
            InstanceMethod(accelerator, name, functools.partial(self._once, name))
            for name in _METHODS
        ]

    def restart(self) -> None:
        """Begins with the first call again."""
        self._next = 0

    def obstacle(self) -> str | None:
        """Returns why the step cannot run again, None if it can."""
        if self._is_inside:
            return "memory ran out while the Accelerator exchanged tensors between ranks."
        return None

    def close(self) -> None:
        """Gives the Accelerator its methods back."""
        for seam in reversed(self._seams):
            seam.remove()

    def _once(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the method's
        if self._is_inside:  # one of them calls another
            return method(*args, **kwargs)
        if self._next < len(self._results):
            known, result = self._results[self._next]
            if known != name:
                raise RuntimeError(
                    f"a step that runs again calls `accelerator.{name}` where it called "
                    f"`accelerator.{known}` before: expected the same calls in the same order."
                )
        else:
            result = self._first(name, method, args, kwargs)
        self._next += 1
        return copied(result, leaf=torch.Tensor.clone)

    def _first(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - as the method's
        self._collectives.look()
        self._is_inside = True  # and so it stays if memory runs out
        result = method(*args, **kwargs)
        self._is_inside = False
        self._collectives.allow()
        self._results.append((name, result))
        return result

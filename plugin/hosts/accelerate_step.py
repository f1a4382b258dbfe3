"""One micro-batch of a host that has an Accelerator: run, and run again if memory runs out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from rematic.control import Rung
from rematic.hosts.accelerate_collectives import ExchangedOnce
from rematic.session import Session
from rematic.session_step import SessionStep
from rematic.split_batch import Reduction, run_in_parts
from rematic.step_comparison import StepComparison
from rematic.step_record import StepRecord
from rematic.step_recovery import StepOutOfMemoryError, run_attempts


class HostState(Protocol):
    """What a host counts inside a step, and what a second attempt must find as it was."""

    def restore(self) -> None:
        """Puts it back to before the step."""


class AcceleratorCounters:
    """Where gradient accumulation stands: `accumulate` inside a step moves it on.

    Args:
        accelerator: The Accelerator.
    """

    def __init__(self, accelerator: Any) -> None:  # noqa: ANN401 - accelerate ships no types
        self._accelerator = accelerator
        self._before = accelerator.step, accelerator.sync_gradients

    def restore(self) -> None:
        """Puts it back to before the step."""
        self._accelerator.step, self._accelerator.sync_gradients = self._before


class RecoverableCall:
    """A call that does forward and backward of one micro-batch.

    Args:
        session: The session.
        accelerator: The Accelerator.
        state: What the host counts.
        obstacle: Why the whole call cannot run again; None if it can, as far as the host knows.
        reduction: How the loss combines the sequences of the batch; None: unknown, and the batch is
            never split.
    """

    def __init__(
        self,
        session: Session,
        accelerator: Any,  # noqa: ANN401 - accelerate ships no types
        state: HostState,
        *,
        obstacle: str | None,
        reduction: Reduction | None = None,
    ) -> None:
        self._session = session
        self._state = state
        self._accelerator = accelerator
        self._obstacle = obstacle
        self._place: int | None = None
        self._reduction = reduction

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, StepRecord]:
        """Runs `fn(*args, **kwargs)` as a step of the session, whose batch is among the arguments.

        Args:
            fn: Forward and backward.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What `fn` returned, and the record of the step.

        Raises:
            StepOutOfMemoryError: If nothing that is allowed helps; all is as before.
        """
        self._place = place = place_of_batch(fn, args)
        named = (value for value in kwargs.values() if not isinstance(value, _NO_BATCHES))
        batch = next(named, None) if place is None else args[place]
        self._session.begin_step(batch, repeatable=True)
        try:
            result = self._attempts(fn, args, kwargs)
        except BaseException as error:
            if isinstance(error, StepOutOfMemoryError):
                self._state.restore()
            self._session.abort_step(error)
            raise
        return result, self._session.end_step()

    def _attempts(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - whatever the user's step returns
        step = SessionStep(self._session)
        place = self._place
        max_parts = 1 if place is None else step.parts_allowed(args[place], self._reduction)
        given = (args[_first_place(fn) :], kwargs)
        recovery = self._session.recovery(given, code=fn, max_parts=max_parts)
        exchanged: ExchangedOnce | None = None
        if recovery.collectives is not None:
            exchanged = ExchangedOnce(self._accelerator, recovery.collectives)
        comparison = StepComparison(self._session, step, recovery)
        has_run = False

        def attempt(rung: Rung | None) -> Any:  # noqa: ANN401 - as above
            nonlocal has_run
            if has_run:
                self._state.restore()
                if exchanged is not None:
                    exchanged.restart()
            has_run = True
            if rung is None or rung.num_parts == 1:
                return fn(*args, **kwargs)
            return self._in_parts(fn, args, kwargs, num_parts=rung.num_parts)

        def obstacle() -> str | None:
            return self._obstacle or (None if exchanged is None else exchanged.obstacle())

        try:
            comparison.run_first(attempt)
            if comparison.is_done:
                result = comparison.result
            else:
                result = run_attempts(recovery, attempt, obstacle=obstacle)
        except BaseException:
            comparison.close()
            raise
        finally:
            recovery.close()
            if exchanged is not None:
                exchanged.close()
        comparison.compare(result)
        return result

    def _in_parts(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        num_parts: int,
    ) -> torch.Tensor | None:
        place = self._place
        assert self._reduction is not None
        assert place is not None

        def one(part: object) -> Any:  # noqa: ANN401 - as above
            self._state.restore()  # all parts together are one micro-batch
            return fn(*args[:place], part, *args[place + 1 :], **kwargs)

        return run_in_parts(
            one,
            args[place],
            num_parts=num_parts,
            reduction=self._reduction,
            model=self._session.model,
        )


def place_of_batch(fn: Callable[..., Any], args: tuple[Any, ...]) -> int | None:
    """Returns which argument of a step is the batch, None if no positional one is.

    It is the first, but for the object of a method, and models and optimizers that are handed in.
    """
    places = range(_first_place(fn), len(args))
    return next((i for i in places if not isinstance(args[i], _NO_BATCHES)), None)


def _first_place(fn: Callable[..., Any]) -> int:
    """Returns where the arguments begin: behind the object of a method."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    first = code.co_varnames[:1] if code is not None and code.co_argcount else ()
    return 1 if first in (("self",), ("cls",)) and not inspect.ismethod(fn) else 0


_NO_BATCHES = (nn.Module, torch.optim.Optimizer, Accelerator)

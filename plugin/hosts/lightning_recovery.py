"""Repeats `training_step` and backward of one micro-batch inside the seams of a Trainer.

Nothing of Lightning's own counting lies inside them. What does is put back: `self.log`, metrics,
the state of the module. Hooks around backward run once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from torch import nn

from rematic.activations.host_generators import save_generators
from rematic.hosts.instance_method import InstanceMethod
from rematic.session import Session
from rematic.session_step import SessionStep
from rematic.step_comparison import StepComparison
from rematic.step_failure import Failure
from rematic.step_recovery import StepRecovery
from rematic.transaction import ModuleSnapshot

_OF_LIGHTNING = frozenset({"_trainer", "_fabric"})
"""Attributes of a module that are no state of it."""
_PLAIN_PRE_BACKWARDS = (
    Precision.pre_backward,
    MixedPrecision.pre_backward,
    FSDPPrecision.pre_backward,
)


class LightningRecovery:
    """One micro-batch of a fit.

    Args:
        session: The session, with the step open.
        module: The module that is trained.
        step: The strategy's `training_step`.
        args: Its arguments, the batch first.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        session: Session,
        module: pl.LightningModule,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._module = module
        self._call: Callable[[], Any] = functools.partial(step, *args, **kwargs)
        self._results = _Results(module.trainer)
        self._recovery: StepRecovery = session.recovery(
            (args, kwargs),
            code=module.training_step,
            others=self._results.metrics,
            skipped=_OF_LIGHTNING,
            counts_gradients=not module.automatic_optimization,
        )
        self._comparison = StepComparison(session, SessionStep(session), self._recovery)

    def forward(self) -> Any:  # noqa: ANN401 - what a training step returns is up to its author
        """Runs the training step until it succeeds; in manual optimization that is all there is.

        Where the batch is to run under two policies, this is the first run.
        """
        if self._module.automatic_optimization:
            self._comparison.begin()
        while True:
            try:
                output = self._call()
            except BaseException as error:
                failure = self._recovery.note(error)
                if failure is None:
                    raise
            else:
                return output
            # outside `except`: the failed attempt is freed before the next one begins
            self._recovery.answer(failure)
            self._results.restore()

    @contextmanager
    def guarding(self, plugin: Precision, closure_loss: torch.Tensor) -> Iterator[None]:
        """Runs a backward of the strategy, of which what fails inside the plugin is repeated."""
        assert self._recovery.transaction is not None
        self._recovery.transaction.count_gradients()
        put_generators = save_generators()

        def backward(inner: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:  # noqa: ANN401 - as the plugin's
            again = _Backward(self, plugin, put_generators)
            return again.run(lambda loss: inner(loss, *args, **kw), tensor, closure_loss)

        seam = InstanceMethod(plugin, "backward", backward)
        try:
            yield
        finally:
            seam.remove()

    def commit(self) -> None:
        """Ends a micro-batch that is done."""
        self._comparison.close()
        self._recovery.commit()

    def close(self, *, puts_back: bool = False) -> None:
        """Ends it in any other way; safe to call twice.

        Args:
            puts_back: Whether everything is to be as before it, as far as that is possible.
        """
        self._comparison.close()
        if puts_back:
            self._recovery.put_back()
        self._recovery.close()

    @property
    def is_compared(self) -> bool:
        """Whether backward is going to end the first of two runs."""
        return self._comparison.is_running

    def now(self) -> tuple[ModuleSnapshot, _ResultsNow]:
        """Returns the state of modules and of `self.log` as hooks have left it."""
        transaction = self._recovery.transaction
        assert transaction is not None
        return transaction.modules_now(), self._results.now()

    def turn(self, loss: torch.Tensor | None) -> bool:
        """Puts everything back to before the training step, for the second of two runs.

        Returns:
            Whether there is to be one; if not, the first stands for the step.
        """
        if not self._comparison.turn(None if loss is None else loss.detach()):
            return False
        self._results.restore()
        return True

    def compare(self, loss: torch.Tensor | None) -> None:
        """Takes down how far the second run is from the first, if there were two."""
        self._comparison.compare(loss)

    def note(self, error: BaseException, *losses: torch.Tensor | None) -> Failure | None:
        """Reads and frees a failed backward."""
        return self._recovery.note(error, *losses)

    def answer_backward(self, failure: Failure, obstacle: str | None) -> tuple[Any, Any]:
        """Puts everything back to before the training step.

        Returns:
            The state of modules and of `self.log` as hooks have left it since.
        """
        since = self.now()
        self._recovery.answer(failure, obstacle=obstacle)
        self._results.restore()
        return since

    def loss_again(self, plugin: Precision) -> torch.Tensor:
        """Runs the training step again; returns its loss as backward takes it."""
        module = self._module
        function, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            with torch.enable_grad():
                output = self._call()
        finally:
            module._current_fx_name = function
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss = loss / module.trainer.accumulate_grad_batches
        scaler = getattr(plugin, "scaler", None)
        scaled: torch.Tensor = loss if scaler is None else scaler.scale(loss)
        return scaled


class _Backward:
    """A backward that is repeated with a forward before it."""

    def __init__(
        self, recovery: LightningRecovery, plugin: Precision, put_generators: Callable[[], None]
    ) -> None:
        self._recovery = recovery
        self._plugin = plugin
        self._put_generators = put_generators
        self._obstacle: str | None = None
        if type(plugin).pre_backward not in _PLAIN_PRE_BACKWARDS:
            self._obstacle = (
                f"{type(plugin).__name__} changes the loss before backward in a way of its own."
            )

    def run(
        self,
        backward: Callable[[torch.Tensor], Any],
        tensor: torch.Tensor,
        closure_loss: torch.Tensor,
    ) -> Any:  # noqa: ANN401 - as the plugin's
        """Runs `backward(tensor)`, and again from a new forward until it succeeds."""
        recovery = self._recovery
        held: list[torch.Tensor | None] = [tensor, closure_loss]
        del tensor, closure_loss
        is_compared = recovery.is_compared and self._obstacle is None
        before = recovery.now() if is_compared else None
        since: tuple[ModuleSnapshot, _ResultsNow] | None = None
        while True:
            try:
                if since is not None:
                    held = [recovery.loss_again(self._plugin)]
                    _put_back(*since)
                    self._put_generators()
                result = backward(held[0])  # type: ignore[arg-type] # it is there
            except BaseException as error:
                failure = recovery.note(error, *held)
                if failure is None:
                    raise
            else:
                if before is None or not recovery.turn(held[0]):
                    recovery.compare(held[0])
                    return result
                failure = None
            held = [None]
            if failure is None:
                since = before
            else:
                first = recovery.answer_backward(failure, self._obstacle)
                since = since or first
            before = None


def _put_back(modules: ModuleSnapshot, results: _ResultsNow) -> None:
    modules.restore()
    results.restore()


class _ResultsNow:
    """What `self.log` holds at one moment."""

    def __init__(self, collection: dict[str, Any] | None) -> None:
        self._collection = collection
        self._items = dict(collection or {})
        self._attributes = dict(vars(collection)) if collection is not None else {}

    def restore(self) -> None:
        """Puts the collection back; the metrics in it belong to the snapshot of modules."""
        if self._collection is not None:
            self._collection.clear()
            self._collection.update(self._items)
            vars(self._collection).update(self._attributes)


class _Results:
    """The collection behind `self.log`; private in Lightning 2.6, hence looked for."""

    def __init__(self, trainer: pl.Trainer) -> None:
        found = getattr(trainer, "_results", None)
        self._collection: dict[str, Any] | None = found if isinstance(found, dict) else None
        self._before = self.now()
        self.metrics = [m for m in (self._collection or {}).values() if isinstance(m, nn.Module)]
        """The metrics in it, each of which holds a state."""

    def now(self) -> _ResultsNow:
        """Returns what it holds now."""
        return _ResultsNow(self._collection)

    def restore(self) -> None:
        """Puts back what it held before the step."""
        self._before.restore()

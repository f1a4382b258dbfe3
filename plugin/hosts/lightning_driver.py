"""Drives a Session at the two seams of a Lightning Trainer: `training_step` and `backward`.

These two are reached for every micro-batch, with and without accumulation, and lie inside the
closure that the optimizer calls, so that nothing of Lightning's own counting is repeated.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from rematic.activations import replaying
from rematic.at_stop import UNFINISHED
from rematic.attachment import attach
from rematic.batch_shape import BatchShape, default_batch_shape
from rematic.control import StopReport
from rematic.hosts.evaluation_advice import advise_on_evaluation
from rematic.hosts.gradient_seams import cover_methods
from rematic.hosts.instance_method import InstanceMethod
from rematic.hosts.lightning_checkpoint import save_emergency_checkpoint
from rematic.hosts.lightning_recovery import LightningRecovery
from rematic.hosts.progress_figures import progress_figures
from rematic.hosts.session_file import take_up
from rematic.hosts.step_figures import StepFigures
from rematic.journal import EventSink
from rematic.memory import HostProbe, Probe, is_out_of_memory
from rematic.memory.storages import storages_of
from rematic.policy import Policy
from rematic.recipes import Recipe
from rematic.session import Session
from rematic.update_cover import is_untold, note_told, stop_outside

if TYPE_CHECKING:
    from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress  # for its type

_log = logging.getLogger("rematic")
CHECKPOINT_KEY = "rematic"
"""Where a checkpoint holds the state of the session; a stock Trainer does not look there."""


class LightningDriver:
    """One session for each fit. The strategies and the callback are thin over it.

    The arguments are those of `rematic.attach`; `batch_shape` None stands for its default.
    """

    def __init__(
        self,
        *,
        recipe: str | Path | Recipe,
        budget: int | float | str | None,
        policy: str | Policy | None,
        probe: str | Probe | None,
        batch_shape: Callable[[object], BatchShape] | None,
        journal: EventSink | None,
    ) -> None:
        self.session: Session | None = None
        """The session of the fit that runs or ran last; None before the first."""
        self._attach = functools.partial(
            attach,
            recipe=recipe,
            budget=budget,
            policy=policy,
            probe=probe,
            batch_shape=batch_shape or default_batch_shape,
            journal=journal,
        )
        self._figures = StepFigures()
        self._last_logged = 0
        self._makes_probe = probe is None or isinstance(probe, str)
        self._module: pl.LightningModule | None = None
        self._log: InstanceMethod | None = None
        self._bar: InstanceMethod | None = None
        self._seams: list[InstanceMethod] = []
        self._num_begun = 0
        self._covered: list[torch.optim.Optimizer] = []
        self._is_open = False
        self._recovery: LightningRecovery | None = None
        self._restored: Mapping[str, Any] | None = None
        self._checkpoint_bytes = 0

    @property
    def is_attached(self) -> bool:
        """Whether a fit runs."""
        return self._module is not None

    def attach(self, module: pl.LightningModule, device: torch.device | None = None) -> None:
        """Attaches for one fit, and takes up the state of its checkpoint.

        Args:
            module: The module.
            device: Where it is going to train; None for where it is.
        """
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            rank_zero_warn(
                "training_step(dataloader_iter) fetches its batches itself, after rematic has made "
                "the plan: every batch counts as one token. Take `batch` instead where lengths "
                "vary."
            )
        session = self._attach(module, device=device)
        if session.settings.allow_split:
            rank_zero_warn(
                "control.allow_split has no effect here: it needs forward and backward in one "
                "call, as in `session.run` or `@plugin.step`."
            )
        restored, self._restored = self._restored, None
        if restored is not None:
            try:
                take_up(session, restored)
            except BaseException:
                session.detach()
                raise
        if self._makes_probe and isinstance(session.probe, HostProbe):
            # The loaded checkpoint is in memory and soon will not be: no overhead of the process.
            overhead_bytes = session.probe.overhead_bytes - self._checkpoint_bytes
            session.probe.overhead_bytes = max(0, overhead_bytes)
        session.at_stop = self.save_emergency_checkpoint
        session.split_by = None
        self.session = session
        self._module = module
        self._num_begun = 0
        self._cover_gradient_work(module)
        self._figures, self._last_logged = StepFigures(), module.trainer.global_step
        self._log = InstanceMethod(module, "log", _log_once)
        bar = module.trainer.progress_bar_callback
        if bar is not None:
            show = functools.partial(_with_figures, session)
            self._bar = InstanceMethod(bar, "get_metrics", show)

    def detach(self) -> None:
        """Leaves the module and the optimizers as they were; safe to call at any time."""
        self._restored, self._checkpoint_bytes = None, 0
        if self.session is None or self._log is None:
            return
        self._log.remove()
        if self._bar is not None:
            self._bar.remove()
        for seam in self._seams:
            seam.remove()
        self.session.detach()
        self._module, self._log, self._bar = None, None, None
        self._covered, self._seams, self._is_open = [], [], False

    def training_step(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> Any:  # noqa: ANN401 - what a training step returns is up to its author
        """Runs a training step: forward and loss, and in manual optimization all there is.

        If memory runs out it runs again, under a heavier plan and with all that it changed put
        back.

        Args:
            step: The strategy's `training_step`.
            args: Its arguments, the batch first.
            kwargs: Its keyword arguments.
            optimizers: The strategy's optimizers.
        """
        if self.session is None or self._module is None:
            return step(*args, **kwargs)
        self.cover(optimizers)
        self._log_figures(self._module.trainer)
        batch = args[0] if args else kwargs.get("batch")
        self.session.begin_step(batch, repeatable=self._module.automatic_optimization)
        self._is_open = True
        self._num_begun = self._progress.total.ready
        try:
            self._recovery = LightningRecovery(self.session, self._module, step, args, kwargs)
            output = self._recovery.forward()
        except BaseException as error:
            self.abort(error)
            raise
        # without a loss Lightning skips backward
        if output is None or not self._module.automatic_optimization:
            self._end()
        return output

    def backward(
        self, backward: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Runs a backward; in automatic optimization the step ends with it.

        Args:
            backward: The strategy's `backward`.
            args: Its arguments, the loss first.
            kwargs: Its keyword arguments.
        """
        if not self._is_open or self._module is None or not self._module.automatic_optimization:
            return backward(*args, **kwargs)
        assert self._recovery is not None
        try:
            with self._recovery.guarding(self._precision_plugin(), args[0]):
                loss = backward(*args, **kwargs)
        except BaseException as error:
            self.abort(error)
            raise
        self._end()
        return loss

    def explain(self, error: BaseException, trainer: pl.Trainer) -> None:
        """Says what helps where the error is one that no training policy can answer."""
        evaluates = trainer.evaluating or trainer.predicting or trainer.sanity_checking
        if evaluates and is_out_of_memory(error):
            stage = trainer.state.stage
            advise_on_evaluation("evaluation" if stage is None else stage.value)

    def abort(self, error: BaseException) -> None:
        """Ends a step that something interrupted, and a training that ran out of memory outside."""
        recovery, self._recovery = self._recovery, None
        stops = self._stops(error)
        if recovery is not None:
            recovery.close(puts_back=stops)
        if self._is_open and self.session is not None and not stops:
            self.session.abort_step(error)
        if stops:
            self._stop(error)
        self._is_open = False

    def save_emergency_checkpoint(self, report: StopReport, path: Path | None = None) -> str:
        """Saves a training that stops, as it was behind the last optimizer step.

        Args:
            report: Why it stops.
            path: As of `lightning_checkpoint.save_emergency_checkpoint`.

        Returns:
            The file.

        Raises:
            NotSavedError: If it should not be saved.
        """
        assert self.session is not None
        assert self._module is not None
        num_finished = self._num_begun - self._is_open
        return save_emergency_checkpoint(
            self._module.trainer,
            self.session,
            num_done=num_finished - report.num_unsaved_steps,
            path=path,
        )

    def _cover_gradient_work(self, module: pl.LightningModule) -> None:
        scaler = getattr(module.trainer.precision_plugin, "scaler", None)
        self._seams = cover_methods(module, ["configure_gradient_clipping"], lambda: self.session)
        if scaler is not None:
            self._seams += cover_methods(scaler, ["unscale_"], lambda: self.session)

    @property
    def _progress(self) -> BatchProgress:
        assert self._module is not None
        progress: BatchProgress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return progress

    def _stops(self, error: BaseException) -> bool:
        """Whether memory ran out in a training, where nobody has told of it yet."""
        if self.session is None or self._module is None or not is_untold(error):
            return False
        return self._module.trainer.training

    def _stop(self, error: BaseException) -> None:
        assert self.session is not None
        note_told(error)
        stop = stop_outside(self.session, error, unfinished=self._unfinished())
        _log.error("%s", stop)
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(str(stop))

    def _unfinished(self) -> str | None:
        """Makes ready to save outside of a step; returns why that must not be, None if it can."""
        assert self.session is not None
        if not self.session.is_behind_update:
            return None
        counts = self._progress.total
        if counts.ready == self._num_begun != counts.completed:
            return UNFINISHED
        self.session.begin_window()
        return None

    def save(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Adds the session's state to a checkpoint that holds more than weights."""
        if self.session is not None and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self.session.state_dict()

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the session's state from a checkpoint, at once or when the session is there.

        (A Trainer reads the checkpoint before it sets up its strategy.)
        """
        self._checkpoint_bytes = _host_bytes(checkpoint)
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is None:
            rank_zero_info(
                "The checkpoint holds no state of rematic: its controller starts afresh, with the "
                "recipe's policy and nothing learned."
            )
        elif self.session is not None and self.is_attached:
            take_up(self.session, state)
        else:
            self._restored = state

    def cover(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Puts the retry at the op around the steps of optimizers.

        Before the first step, in which a training step runs as the closure; and before every later
        one, since callbacks such as a learning-rate finder exchange optimizers.
        """
        if self.session is None or not self.is_attached:
            return
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._covered):
                self._covered.append(optimizer)
                self.session.add_optimizers(optimizer)

    def _end(self) -> None:
        assert self.session is not None
        assert self._recovery is not None
        self._is_open = False
        self._recovery.commit()
        self._recovery = None
        self._figures.add(self.session.end_step())

    def log_last_figures(self) -> None:
        """Gives loggers what the last steps of a fit took, if theirs are due."""
        if self.session is not None and self._module is not None:
            self._log_figures(self._module.trainer)

    def _log_figures(self, trainer: pl.Trainer) -> None:
        """Gives loggers the figures of the steps so far, as often as they get the user's."""
        every: int = getattr(trainer, "log_every_n_steps", 0)  # set late, so not declared
        step = trainer.global_step
        if not trainer.loggers or every < 1 or step // every <= self._last_logged // every:
            return
        self._last_logged = step
        figures = self._figures.take()
        if not figures:  # a resumed count, and no step since
            return
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step - 1)  # steps of a logger count from 0

    def _precision_plugin(self) -> Precision:
        assert self._module is not None
        plugin: Precision = self._module.trainer.precision_plugin
        return plugin


def _host_bytes(checkpoint: Mapping[str, Any]) -> int:
    storages = {id(s): s for s in storages_of(checkpoint) if s.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages.values())


def _log_once(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # A unit that logs would do so again when it is replayed in backward, where Lightning refuses.
    if not replaying():
        log(*args, **kwargs)


def _with_figures(
    session: Session, get_metrics: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    return {**get_metrics(*args, **kwargs), **progress_figures(session)}

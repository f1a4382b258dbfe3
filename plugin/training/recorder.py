"""Writes what a run leaves behind: journal frame, metrics, checkpoints; and stops it cleanly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rematic.control import StopReport
from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.journal import EventSink
from rematic.training.interrupts import StopRequest
from rematic.training.json_lines import JsonLines
from rematic.training.loader import BatchLoader
from rematic.training.trained_module import TrainedModule

if TYPE_CHECKING:
    from torch import Tensor

    from rematic.training.progress import Figures
    from rematic.training.run_directory import RunDirectory


class RunRecorder(Callback):
    """Follows a fit and records it; every checkpoint lies right after an optimizer step.

    Args:
        directory: Where the files go.
        journal: Receives `run_start` and `run_end`.
        loader: Told which batches are finished, so that a checkpoint knows.
        stop: Asked after every optimizer step whether somebody wants to stop.
        figures: Gives the last step.
        facts: What `run_start` says.
        checkpoint_every_steps: Optimizer steps between checkpoints; None: only at the end.
        notify: Is told what a person should know.
        is_first: Whether this process writes; of several that train together one does.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        journal: EventSink,
        loader: BatchLoader,
        stop: StopRequest,
        figures: Figures,
        facts: Callable[[], Mapping[str, object]],
        checkpoint_every_steps: int | None,
        notify: Callable[[str], None],
        is_first: bool = True,
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._loader = loader
        self._stop = stop
        self._figures = figures
        self._facts = facts
        self._checkpoint_every_steps = checkpoint_every_steps
        self._notify = notify
        self._is_first = is_first
        self._has_begun = False
        self._metrics = JsonLines(directory.metrics, notify=notify)
        self._has_told_of_loss = False
        self._optimizer_steps = 0
        self._last_loss: float | None = None
        self.finished_batches = 0
        """Batches that this process has trained."""
        self._learning_rate = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._stop.signal_number is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was trained that is worth keeping: the run is new, or had not gone on."""
        is_fresh = bool(self._directory.created) or not self._has_begun
        return not self.finished_batches and is_fresh

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops figures of batches that are trained again.

        From here on a signal waits for the next optimizer step.
        """
        self._has_begun = True
        self._optimizer_steps = trainer.global_step
        if self._is_first:
            self._metrics.drop_after("batch", self._loader.finished)
        self._journal.write({"event": "run_start", **self._facts()})
        self._stop.defer("after this step")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Notes the learning rate that this batch will be trained with."""
        self._learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Records the batch; saves and stops where that is asked for."""
        self._loader.finished += 1
        self.finished_batches += 1
        self._last_loss = float(trainer.callback_metrics["loss"])
        if not math.isfinite(self._last_loss):
            self._tell_of_loss(self._last_loss)
        self._write_metrics(trainer)
        if trainer.global_step == self._optimizer_steps:
            return  # more micro-batches belong to this step
        self._optimizer_steps = trainer.global_step
        every = self._checkpoint_every_steps
        if self._agree_to_stop(trainer):
            trainer.should_stop = True
        is_due = every is not None and trainer.global_step % every == 0
        if trainer.should_stop or is_due or _is_last(trainer):
            self._save(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the journal; the checkpoint was saved with the last batch."""
        self._stop.stop_deferring()
        interrupted = self._stop.signal_number is not None
        self._end("interrupted" if interrupted else "finished", reason=None)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Ends the journal."""
        self._stop.stop_deferring()
        if self.is_empty and isinstance(exception, (ValueError, KeyboardInterrupt)):
            return  # the folder goes away
        interrupted = isinstance(exception, KeyboardInterrupt)
        reason = None if interrupted else " ".join(str(exception).split())[:2000]
        self._end("interrupted" if interrupted else "failed", reason=reason)

    def save_at_stop(self, strategy: SessionStrategy, report: StopReport) -> str:
        """Saves a run that stops for good, behind its last optimizer step, to be resumed.

        Args:
            strategy: What trains it.
            report: Why it stops.

        Returns:
            The run's checkpoint.

        Raises:
            NotSavedError: If there is nothing to save, or other processes have not stopped.
        """
        loader, module, session = self._loader, strategy.lightning_module, strategy.session
        assert isinstance(module, TrainedModule)
        assert session is not None
        before = loader.finished, module.batches_before
        loader.finished -= report.num_unsaved_steps
        module.batches_before = loader.finished  # it has counted the batch that failed
        try:
            path = strategy.save_emergency_checkpoint(report, self._directory.checkpoint)
        finally:
            loader.finished, module.batches_before = before
        self._note_checkpoint(step=session.num_steps - 1)
        return path

    def _tell_of_loss(self, loss: float) -> None:
        """Says once that what follows is worth nothing; the run goes on, as a plain loop would."""
        if self._has_told_of_loss:
            return
        self._has_told_of_loss = True
        text = (
            f"the loss of batch {self._loader.finished} is {loss}; expected a finite number, and "
            "what is trained from here on is of no use: lower training.learning_rate, write "
            "training.clip_norm, or correct the value of model.config that makes it so"
        )
        step = self._figures()
        self._journal.write(
            {
                "event": "notice",
                "step": 0 if step is None else step.step,
                "unit": "",
                "kind": "loss",
                "text": text,
                "figures": {},
            }
        )
        if self._is_first:
            self._notify(text)

    def _agree_to_stop(self, trainer: pl.Trainer) -> bool:
        """Whether a process was asked to stop; all of them stop after the same step."""
        if trainer.world_size == 1:
            return self.is_stopped
        return trainer.strategy.reduce_boolean_decision(self.is_stopped, all=False)

    def _write_metrics(self, trainer: pl.Trainer) -> None:
        if not self._is_first:
            return
        step = self._figures()
        line = {
            "batch": self._loader.finished,
            "optimizer_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "loss": self._last_loss,
            "learning_rate": self._learning_rate,
            "length": None if step is None else step.length,
            "seconds": None if step is None else step.seconds,
            "peak_bytes": None if step is None else step.peak_bytes,
        }
        self._metrics.append(line)

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self._directory.checkpoint)
        step = self._figures()
        self._note_checkpoint(step=None if step is None else step.step)

    def _note_checkpoint(self, *, step: int | None) -> None:
        path = str(self._directory.checkpoint)
        self._journal.write({"event": "checkpoint", "step": step, "path": path})

    def _end(self, status: str, *, reason: str | None) -> None:
        self._journal.write(
            {"event": "run_end", "status": status, "reason": reason, "last_loss": self._last_loss}
        )


def _is_last(trainer: pl.Trainer) -> bool:
    """Whether training ends with this optimizer step.

    A checkpoint saved later, in `on_train_end`, would not do: given more epochs, a fit of
    Lightning 2.6 goes on from it with other batches than an uninterrupted one.
    """
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs
    return last_epoch and trainer.is_last_batch

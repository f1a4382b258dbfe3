"""Shows a person how the training goes: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar
from typing_extensions import override

from rematic.byte_sizes import format_bytes
from rematic.journal import describe_plan

if TYPE_CHECKING:
    from torch import Tensor

    from rematic.step_record import StepRecord

    Figures = Callable[[], StepRecord | None]
    """Gives the step that was just finished; None before the first."""

BAR_FORMAT = (
    "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
)
"""A short bar: the words behind it are what a person reads."""

LINE_INTERVAL_SECONDS = 5.0
"""Least time between two lines where there is no terminal."""


def describe_step(step: StepRecord) -> dict[str, str]:
    """A step in a few short words, by what they say."""
    rate = step.tokens / step.seconds if step.seconds else 0.0
    return {
        "tokens/s": f"{rate:,.0f}",
        "length": f"{step.length:,}",
        "memory": _memory(step),
        "policy": f"{step.policy} ({describe_plan(step.plan)})",
    }


class ProgressBar(TQDMProgressBar):
    """Lightning's bar on stderr, with memory, speed and policy of the last step.

    Args:
        figures: Gives the last step.
    """

    def __init__(self, figures: Figures) -> None:
        super().__init__(leave=True)
        self._figures = figures
        Tqdm.monitor_interval = 0  # its thread cannot start under a memory cap

    @override
    def init_train_tqdm(self) -> Tqdm:
        """The bar of one epoch; stdout stays free for what `--json` prints."""
        return Tqdm(
            desc=self.train_description,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stderr,
            smoothing=0,
            bar_format=BAR_FORMAT,
        )

    @override
    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        step = self._figures()
        loss = trainer.callback_metrics.get("loss")
        return {
            **({} if loss is None else {"loss": f"{float(loss):.3f}"}),
            **({} if step is None else describe_step(step)),
        }


class ProgressLines(Callback):
    """The same as lines of text, for logs and pipes.

    Args:
        figures: Gives the last step.
        stream: Where the lines go.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self,
        figures: Figures,
        *,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures = figures
        self._stream = stream
        self._clock = clock
        self._last_line_seconds = clock()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Prints a line when the last one is old, and for the last batch."""
        step, now = self._figures(), self._clock()
        is_last = trainer.is_last_batch
        if step is None or (now - self._last_line_seconds < LINE_INTERVAL_SECONDS and not is_last):
            return
        self._last_line_seconds = now
        words = ", ".join(f"{name} {value}" for name, value in describe_step(step).items())
        loss = float(trainer.callback_metrics["loss"])
        print(
            f"epoch {trainer.current_epoch + 1}, document {batch_idx + 1} of "
            f"{trainer.num_training_batches}: loss {loss:.3f}, {words}",
            file=self._stream,
            flush=True,
        )


def progress_callback(figures: Figures) -> Callback:
    """The bar where a person looks at stderr, lines elsewhere."""
    if sys.stderr.isatty():
        return ProgressBar(figures)
    return ProgressLines(figures, stream=sys.stderr)


def _memory(step: StepRecord) -> str:
    used = format_bytes(step.peak_bytes)
    return used if step.budget_bytes is None else f"{used} of {format_bytes(step.budget_bytes)}"

"""Drives a Session from inside a Trainer of Transformers, at its `training_step`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from rematic.hosts.accelerate_driver import AccelerateDriver
from rematic.hosts.evaluation_advice import advise_on_evaluation
from rematic.hosts.instance_method import InstanceMethod
from rematic.hosts.session_file import write_session
from rematic.hosts.trainer_counters import TrainerCounters
from rematic.hosts.transformers_checkpoint import TrainerSaves
from rematic.memory import is_out_of_memory
from rematic.step_recovery import StepOutOfMemoryError
from rematic.update_cover import is_untold, note_told, stop_outside

_log = logging.getLogger("rematic")
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""The argument and its older name."""
_OFFLOADING = "maybe_activation_offload_context"
"""Where TRL's trainers keep the context of their `activation_offloading`."""


class TrainerDriver:
    """One Trainer; a session for each `train()`.

    Args:
        driver: What drives its Accelerator.
        trainer: The Trainer.
        use_cache: Config and value of its `use_cache` before the Trainer was made; None: unknown.
    """

    def __init__(
        self, driver: AccelerateDriver, trainer: Trainer, *, use_cache: tuple[Any, Any] | None
    ) -> None:
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"the Trainer trains on {trainer.args.n_gpu} GPUs by nn.DataParallel, which copies "
                "the model for every step: expected one GPU for each process. Start it by "
                "`accelerate launch` or `torchrun`, or show it one GPU by CUDA_VISIBLE_DEVICES."
            )
        driver.attach(trainer.accelerator, may_be_prepared=True)
        self.trainer = trainer
        self._driver = driver
        self._use_cache = use_cache
        self._give_back: list[Callable[[], None]] = []
        self._take_over()
        driver.manages_prepared = False  # until `train()`
        driver.split_by = None
        self._of_loops = driver.saves
        driver.saves = self._saves = TrainerSaves(trainer, driver.options.emergency_dir)
        self._callbacks = (_SavesSession(driver), self._saves.callback)
        for callback in self._callbacks:
            trainer.add_callback(callback)
        self._seams = [
            InstanceMethod(trainer, "train", self._train),
            InstanceMethod(trainer, "training_step", self._training_step),
            InstanceMethod(trainer, "evaluation_loop", self._evaluation_loop),
            InstanceMethod(trainer, "log", self._log_figures),
            InstanceMethod(trainer, "save_model", self._save_model),
        ]

    def detach(self) -> None:
        """Gives the Trainer back."""
        self._driver.manages_prepared = True
        self._driver.saves = self._of_loops
        for seam in reversed(self._seams):
            seam.remove()
        for callback in self._callbacks:
            self.trainer.remove_callback(callback)
        while self._give_back:
            self._give_back.pop()()

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 - as train's
        self._take_over()
        if resume_from_checkpoint is True:
            newest = self._saves.newest()
            resume_from_checkpoint = True if newest is None else str(newest)
        self._driver.restore_from = self._folder(resume_from_checkpoint)
        self._driver.manages_prepared = True
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        except RuntimeError as error:
            stop = self._stopped_by(error)
            if stop is None:
                raise
            raise stop from error
        finally:
            self._driver.restore_from = None
            self._driver.manages_prepared = False
            self._driver.detach_model()
            if self._use_cache is not None:
                config, value = self._use_cache
                config.use_cache = value

    def _stopped_by(self, error: RuntimeError) -> StepOutOfMemoryError | None:
        """Saves a training that ran out of memory between its steps; returns how it is to end."""
        session = self._driver.session
        if session is None or not is_untold(error):
            return None
        return stop_outside(session, error, unfinished=self._saves.settle(session))

    def _training_step(
        self, step: Callable[..., Any], model: nn.Module, inputs: object, *args: Any, **kwargs: Any
    ) -> Any:  # noqa: ANN401 - as training_step's
        trainer = self.trainer
        if not self._driver.is_attached:  # a model that is wrapped already is not prepared again
            assert trainer.optimizer is not None
            self._driver.manage(trainer.accelerator.unwrap_model(model), [trainer.optimizer])
        return self._driver.step(
            step, (model, inputs, *args), kwargs, state=TrainerCounters(trainer)
        )

    def _evaluation_loop(
        self,
        loop: Callable[..., Any],
        dataloader: object,
        description: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 - as evaluation_loop's
        try:
            return loop(dataloader, description, *args, **kwargs)
        except BaseException as error:
            if is_out_of_memory(error):
                note_told(error)
                advise_on_evaluation(description.lower())
            raise

    def _log_figures(
        self, log: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        evaluated = any(name.startswith("eval_") for name in logs)
        figures = {} if evaluated else self._driver.figures.take()
        given = {**logs, **figures}
        log(given, *args, **kwargs)
        # the Trainer adds the epoch to what it was given, and returns it as metrics
        logs.update({name: value for name, value in given.items() if name not in figures})

    def _save_model(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with self._cache_as_remembered():
            save(*args, **kwargs)

    @contextlib.contextmanager
    def _cache_as_remembered(self) -> Iterator[None]:
        if self._use_cache is None:
            yield
            return
        config, remembered = self._use_cache
        present, config.use_cache = config.use_cache, remembered
        try:
            yield
        finally:
            config.use_cache = present

    def _folder(self, resume_from_checkpoint: str | bool | None) -> Path | None:
        if resume_from_checkpoint is not True:
            return Path(resume_from_checkpoint) if resume_from_checkpoint else None
        last: str | None = get_last_checkpoint(self.trainer.args.output_dir)  # type: ignore[no-untyped-call] # transformers 5.24
        return None if last is None else Path(last)

    def _take_over(self) -> None:
        """Turns off what else would checkpoint or move activations."""
        taken = [n for n in _CHECKPOINTING if self._turn_off(self.trainer.args, n, off=False)]
        if taken:
            _log.warning(
                "%s of the TrainingArguments is taken over by rematic, whose recipe decides.",
                taken[0],
            )
        held = getattr(self.trainer, _OFFLOADING, None)
        if held is not None and not isinstance(held, contextlib.nullcontext):
            self._turn_off(self.trainer, _OFFLOADING, off=contextlib.nullcontext())
            _log.warning(
                "activation_offloading of TRL is turned off while rematic is attached: its hooks "
                "would hide what the units save. Write `policy: {start: offload}` in the recipe "
                "to move activations."
            )

    def _turn_off(self, owner: object, name: str, *, off: object) -> bool:
        before = getattr(owner, name, None)
        if not before:
            return False
        setattr(owner, name, off)
        self._give_back.append(lambda: setattr(owner, name, before))
        return True


class _SavesSession(TrainerCallback):
    """Writes the state of the session into every checkpoint of the Trainer.

    Args:
        driver: What holds the session.
    """

    def __init__(self, driver: AccelerateDriver) -> None:
        self._driver = driver

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Writes it, where the Trainer itself has saved."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        session = self._driver.session
        if args.should_save and session is not None and folder.is_dir():
            write_session(session, folder)

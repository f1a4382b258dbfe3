"""Puts the Lightning parts of one run together and runs them."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from rematic.hosts.lightning import RecomputeStrategy
from rematic.journal import JournalWriter
from rematic.memory import HostProbe, process_overhead_bytes
from rematic.recipes import Recipe
from rematic.session import Session
from rematic.step_record import StepRecord
from rematic.training.checkpoint_file import CheckpointFile
from rematic.training.corpus import Corpus
from rematic.training.heap_cap import HeapCap
from rematic.training.interrupts import StopRequest
from rematic.training.language_model import LanguageModel
from rematic.training.loader import DocumentLoader
from rematic.training.model import ModelSize, build_model, check_budget
from rematic.training.progress import progress_callback
from rematic.training.recorder import RunRecorder, truncate_metrics
from rematic.training.resume import steps_before
from rematic.training.run_directory import RunDirectory

PACKAGES = ("rematic", "torch", "lightning", "transformers")
"""Packages whose versions a run notes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run that has not begun."""

    recipe: Recipe
    """What to train."""
    corpus: Corpus
    """On which documents."""
    loader: DocumentLoader
    """Hands them out."""
    size: ModelSize
    """What the model will hold."""
    directory: RunDirectory
    """Where it is written."""
    is_resumed: bool
    """Whether it goes on with a checkpoint."""


class Fit:
    """One fit of a job.

    Args:
        job: What to do.
        journal: Receives the events.
        stop: Tells that somebody wants to stop.
        notify: Is told what a person should know.
        show_progress: Whether stderr shows how it goes.
    """

    def __init__(
        self,
        job: Job,
        *,
        journal: JournalWriter,
        stop: StopRequest,
        notify: Callable[[str], None],
        show_progress: bool,
    ) -> None:
        self._job = job
        self._notify = notify
        self._show_progress = show_progress
        self._journal = journal
        self._strategy: RecomputeStrategy | None = None
        self.recorder = RunRecorder(
            job.directory,
            journal=journal,
            loader=job.loader,
            stop=stop,
            figures=self._last_step,
            facts=self._facts,
            checkpoint_every_steps=job.recipe.run.checkpoint_every_steps,
        )

    def run(self) -> None:
        """Builds the model and trains it.

        Raises:
            KeyboardInterrupt: Somebody did not want to wait for the end of a step.
        """
        job = self._job
        training = job.recipe.training
        model = build_model(job.recipe.model, max_length=job.loader.max_length, seed=training.seed)
        module = LanguageModel(model, training=training)
        self._strategy = RecomputeStrategy(
            recipe=job.recipe, probe=self._probe(), journal=self._journal
        )
        checkpoint = job.directory.checkpoint if job.is_resumed else None
        with _quiet_lightning():
            try:
                trainer = self._trainer(self._strategy)
                trainer.fit(module, train_dataloaders=job.loader, ckpt_path=checkpoint)
            except SystemExit:  # Lightning's word for Ctrl-C
                raise KeyboardInterrupt from None

    @property
    def session(self) -> Session:
        """The session of the strategy."""
        session = self._strategy.session if self._strategy is not None else None
        if session is None:
            raise RuntimeError("there is no session yet; it is attached when the fit begins")
        return session

    @property
    def _on_cpu(self) -> bool:
        memory = self._job.recipe.memory
        wanted = memory.heap_cap or memory.probe in ("host", "simulated")
        return wanted or not torch.accelerator.is_available()

    def _probe(self) -> HostProbe | None:
        """Made before a checkpoint is loaded, whose bytes would count as the interpreter's."""
        if not self._on_cpu or self._job.recipe.memory.probe == "simulated":
            return None
        return HostProbe(overhead_bytes=process_overhead_bytes(self._job.size.weight_bytes))

    def _trainer(self, strategy: RecomputeStrategy) -> pl.Trainer:
        recipe = self._job.recipe
        callbacks = self._callbacks()
        return pl.Trainer(
            accelerator="cpu" if self._on_cpu else "auto",
            devices=1,
            strategy=strategy,
            precision="bf16-mixed" if recipe.training.precision == "bf16" else "32-true",
            max_epochs=recipe.training.epochs,
            max_steps=recipe.training.max_steps or -1,
            accumulate_grad_batches=recipe.training.accumulate,
            callbacks=callbacks,
            plugins=[CheckpointFile()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=any(isinstance(c, pl.callbacks.ProgressBar) for c in callbacks),
            enable_model_summary=False,
        )

    def _callbacks(self) -> list[Callback]:
        """In this order: refuse, record, show, and cap last, when all else has begun."""
        callbacks: list[Callback] = [_BudgetCheck(self), self.recorder]
        if self._show_progress:
            callbacks.append(progress_callback(self._last_step))
        if self._job.recipe.memory.heap_cap:
            callbacks.append(HeapCap(self._room_bytes, notify=self._notify))
        return callbacks

    def check_budget(self) -> None:
        """Refuses a budget that only the session could read, such as a fraction of the device."""
        budget_bytes = self.session.budget_bytes
        if budget_bytes is not None:
            check_budget(self._job.size, budget_bytes=budget_bytes)

    def _room_bytes(self) -> int:
        budget_bytes = self.session.budget_bytes
        in_use_bytes = self.session.probe.allocated_bytes()
        if budget_bytes is None or in_use_bytes is None:
            raise RuntimeError(
                "memory.heap_cap needs a budget and a probe that knows the bytes in use; "
                f"the budget is {budget_bytes}, in use are {in_use_bytes}: set memory.budget, or "
                "memory.heap_cap=false"
            )
        return budget_bytes - in_use_bytes

    def _last_step(self) -> StepRecord | None:
        return self.session.last_step

    def _facts(self) -> Mapping[str, object]:
        job = self._job
        facts: dict[str, object] = {
            "name": job.directory.name,
            "recipe": job.recipe.name,
            "corpus": job.corpus.source,
            "corpus_sha256": job.corpus.sha256,
            "documents": len(job.loader),
            "parameters": job.size.num_parameters,
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
        }
        if job.is_resumed:
            facts["resumed_after_step"] = steps_before(job.directory)
            truncate_metrics(job.directory.metrics, batches=job.loader.finished)
        return facts


class _BudgetCheck(Callback):
    """Refuses a budget before the first step."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fit.check_budget()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keeps Lightning's notices about itself off the screen."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning 2.6 asks torch 2.13 in a way that is deprecated.
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            yield
    finally:
        logger.setLevel(level)

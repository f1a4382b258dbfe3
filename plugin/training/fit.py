"""Puts the Lightning parts of one run together and runs them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from transformers import PreTrainedConfig
from typing_extensions import override

from rematic.attachment import policy_of
from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.journal import EventSink
from rematic.memory import HostProbe, process_overhead_bytes
from rematic.recipes import Recipe, format_recipe
from rematic.session import Session
from rematic.stash import load_quantization
from rematic.step_record import StepRecord
from rematic.training.checkpoint_file import CheckpointFile
from rematic.training.data import TrainingData
from rematic.training.dtype_inventory import Held, take_inventory
from rematic.training.evaluation import Evaluator
from rematic.training.heap_cap import HeapCap
from rematic.training.interrupts import StopRequest
from rematic.training.loader import BatchLoader
from rematic.training.model import describe_source, name_attention
from rematic.training.model_size import ModelSize, check_budget
from rematic.training.packing_check import PackingCheck
from rematic.training.prepared_model import prepare_model
from rematic.training.progress import progress_callback
from rematic.training.quiet import quiet_libraries, without_cache
from rematic.training.ranks import RUN_VARIABLE, Ranks
from rematic.training.recorder import RunRecorder
from rematic.training.resume import steps_before
from rematic.training.run_directory import RunDirectory
from rematic.training.saved_weights import save_weights
from rematic.training.strategies import build_strategy, whole_state
from rematic.training.tiled import choose_tiled_loss
from rematic.training.trained_module import TrainedModule

PACKAGES = ("rematic", "torch", "lightning", "transformers")
"""Packages whose versions a run notes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run that has not begun."""

    recipe: Recipe
    """What to train."""
    data: TrainingData
    """On which documents."""
    config: PreTrainedConfig
    """Of the model."""
    size: ModelSize
    """What the model will hold."""
    directory: RunDirectory
    """Where it is written."""
    ranks: Ranks
    """Where this process stands among those of the run."""
    is_resumed: bool
    """Whether it goes on with a checkpoint."""
    allow_code: bool
    """Whether the recipe may name code outside the allow-list."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps in all."""
        training = self.recipe.training
        steps = -(-len(self.data.loader) // training.accumulate) * training.epochs
        return steps if training.max_steps is None else min(steps, training.max_steps)


def trains_on_cpu(recipe: Recipe) -> bool:
    """Whether a recipe is trained on the CPU: it says so, or there is nothing else."""
    wanted = recipe.memory.heap_cap or recipe.memory.probe in ("host", "simulated")
    return wanted or not torch.accelerator.is_available()


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
        journal: EventSink,
        stop: StopRequest,
        notify: Callable[[str], None],
        show_progress: bool,
    ) -> None:
        self._job = job
        self._notify = notify
        self._show_progress = show_progress
        self._journal = journal
        self._strategy: SessionStrategy | None = None
        self._model: nn.Module | None = None
        self._inventory: tuple[Held, ...] = ()
        self.recorder = RunRecorder(
            job.directory,
            journal=journal,
            loader=job.data.loader,
            stop=stop,
            figures=self._last_step,
            facts=self._facts,
            checkpoint_every_steps=job.recipe.run.checkpoint_every_steps,
            notify=notify,
            is_first=job.ranks.is_first,
        )

    def run(self) -> None:
        """Builds the model, trains it, and saves it unless somebody stops it.

        Raises:
            KeyboardInterrupt: Somebody did not want to wait for the end of a step.
        """
        job = self._job
        recipe = choose_tiled_loss(job.recipe, job.config)
        with quiet_libraries():
            self._model = prepare_model(recipe, config=job.config)
        # now: shards do not say any more what they are parts of
        self._inventory = take_inventory(self._model)
        self._tell_inventory()
        module = TrainedModule(
            self._model,
            training=recipe.training,
            total_steps=job.total_steps,
            allow_code=job.allow_code,
            sharded_units=recipe.policy.units if recipe.distributed.strategy == "fsdp2" else None,
        )
        self._strategy = build_strategy(recipe, probe=self._probe(), journal=self._journal)
        checkpoint = job.directory.checkpoint if job.is_resumed else None
        with quiet_libraries(), without_cache(self._model):
            try:
                os.environ[RUN_VARIABLE] = str(job.directory.path.resolve())
                trainer = self._trainer(self._strategy)
                trainer.fit(module, train_dataloaders=job.data.loader, ckpt_path=checkpoint)
            except SystemExit:  # Lightning's word for Ctrl-C
                raise KeyboardInterrupt from None
            finally:
                os.environ.pop(RUN_VARIABLE, None)
        if not self.recorder.is_stopped:
            with quiet_libraries():
                self._save(self._model)

    def _save(self, model: nn.Module) -> None:
        job = self._job
        state = whole_state(job.recipe, model) if job.recipe.saved else None
        if job.ranks.is_first:
            save_weights(
                job.recipe,
                model,
                job.directory.path,
                state=state,
                tokenizer=job.data.tokenizer.saved(),
            )

    def _tell_inventory(self) -> None:
        if self._show_progress:
            for held in self._inventory:
                self._notify(str(held))

    @property
    def session(self) -> Session:
        """The session of the strategy."""
        session = self._strategy.session if self._strategy is not None else None
        if session is None:
            raise RuntimeError("there is no session yet; it is attached when the fit begins")
        return session

    @property
    def _on_cpu(self) -> bool:
        return trains_on_cpu(self._job.recipe)

    def _probe(self) -> HostProbe | None:
        """Made before a checkpoint is loaded, whose bytes would count as the interpreter's.

        What is imported later would count as tensors, so that comes before.
        """
        if policy_of(self._job.recipe).is_lossy or self._job.recipe.policy.allow_lossy:
            load_quantization()
        if not self._on_cpu or self._job.recipe.memory.probe == "simulated":
            return None
        return HostProbe(overhead_bytes=process_overhead_bytes(self._job.size.weight_bytes))

    def _trainer(self, strategy: SessionStrategy) -> pl.Trainer:
        recipe = self._job.recipe
        callbacks = self._callbacks()
        return pl.Trainer(
            accelerator="cpu" if self._on_cpu else "auto",
            devices=recipe.distributed.devices,
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
            use_distributed_sampler=False,
        )

    def _callbacks(self) -> list[Callback]:
        """In this order: refuse, record, evaluate, show, and cap last, when all else has begun."""
        job = self._job
        callbacks: list[Callback] = [_SessionCheck(self)]
        if job.recipe.data.packing:
            callbacks.append(PackingCheck())
        callbacks.append(self.recorder)
        if job.data.evaluation is not None:
            callbacks.append(self._evaluator(job.data.evaluation))
        if self._show_progress:
            callbacks.append(progress_callback(self._last_step))
        if job.recipe.memory.heap_cap:
            callbacks.append(HeapCap(self._room_bytes, notify=self._notify))
        return callbacks

    def _evaluator(self, loader: BatchLoader) -> Evaluator:
        job = self._job
        return Evaluator(
            loader,
            path=job.directory.evaluation if job.ranks.is_first else None,
            every_steps=job.recipe.evaluation.every_steps,
            shift=job.recipe.model.task == "causal-lm",
            notify=self._notify if self._show_progress else _say_nothing,
        )

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
        job, recipe = self._job, self._job.recipe
        assert self._model is not None, "the fit has begun"
        facts: dict[str, object] = {
            "name": job.directory.name,
            "recipe": recipe.name,
            "corpus": job.data.corpus.source,
            "corpus_sha256": job.data.corpus.sha256,
            "sequences_sha256": job.data.encoded.sha256,
            "documents": len(job.data.encoded.examples),
            "documents_cut": job.data.encoded.num_cut,
            "documents_skipped": job.data.encoded.num_skipped,
            "documents_spread": job.data.encoded.num_spread,
            "parameters": job.size.num_parameters,
            "trained": job.size.num_trainable,
            "weights": describe_source(recipe.model),
            "attention": name_attention(self._model),
            "dtypes": [str(held) for held in self._inventory],
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
        }
        if job.is_resumed and job.ranks.is_first:
            facts["resumed_after_step"] = steps_before(job.directory)
            job.directory.recipe.write_text(format_recipe(recipe), encoding="utf-8")
        return facts


class _SessionCheck(Callback):
    """Refuses a budget before the first step, and says where a run that stops is saved."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fit.check_budget()
        strategy = trainer.strategy
        assert isinstance(strategy, SessionStrategy)
        self._fit.session.at_stop = partial(self._fit.recorder.save_at_stop, strategy)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Before the recorder ends the journal."""
        assert isinstance(trainer.strategy, SessionStrategy)
        trainer.strategy.stop(exception)


def _say_nothing(text: str) -> None:
    """Drops what nobody shall see."""

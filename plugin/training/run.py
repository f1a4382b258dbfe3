"""Trains a recipe with Lightning."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path

import torch

from rematic.journal import JournalWriter, RunSummary, read_journal, summarize
from rematic.memory import use_mapping_malloc
from rematic.recipes import MemoryConfig, Recipe, format_recipe
from rematic.training.corpus import load_corpus
from rematic.training.fit import Fit, Job
from rematic.training.interrupts import StopRequest
from rematic.training.loader import build_loader
from rematic.training.model import ModelSize, check_budget, measure_model
from rematic.training.resume import check_resumable
from rematic.training.run_directory import (
    RunDirectory,
    create_run_directory,
    open_run_directory,
)


def train(
    recipe: Recipe,
    *,
    resume: str | Path | None = None,
    stop: StopRequest | None = None,
    show_progress: bool = True,
) -> RunSummary:
    """Trains a recipe in this process and writes its run directory.

    With `memory.heap_cap` the heap of this process is capped while it trains; the command
    `rematic train` gives it a process of its own for that.

    Args:
        recipe: What to train.
        resume: Directory of a run to go on with; None: a new one.
        stop: Watches for Ctrl-C already; None: it is watched here.
        show_progress: Whether stderr shows how it goes.

    Returns:
        The run in figures; `status` says whether it was interrupted.

    Raises:
        ValueError: Something that the user gave cannot be used; nothing is left behind.
        RuntimeError: The training failed; the run directory says how.
    """
    if recipe.memory.heap_cap:
        use_mapping_malloc()  # before torch allocates a tensor
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    job = _prepare(recipe, resume=resume)
    watched = StopRequest(notify=_notice) if stop is None else contextlib.nullcontext(stop)
    with watched as request:
        return _run(job, stop=request, show_progress=show_progress)


def _prepare(recipe: Recipe, *, resume: str | Path | None) -> Job:
    """Checks all that can be checked before weights exist, then makes the run directory."""
    data = recipe.data
    corpus = load_corpus(data.source, text_field=data.text_field, max_documents=data.max_documents)
    loader = build_loader(corpus, data, seed=recipe.training.seed)
    size = measure_model(recipe.model, max_length=loader.max_length)
    _check_memory(recipe.memory, size)
    if resume is None:
        directory = create_run_directory(recipe.run.dir, name=recipe.run.name or recipe.name)
    else:
        directory = open_run_directory(resume)
        check_resumable(directory, recipe, corpus=corpus)
    return Job(
        recipe=recipe,
        corpus=corpus,
        loader=loader,
        size=size,
        directory=directory,
        is_resumed=resume is not None,
    )


def _check_memory(memory: MemoryConfig, size: ModelSize) -> None:
    if memory.budget.kind == "absolute":
        check_budget(size, budget_bytes=int(memory.budget.value or 0))
    if memory.budget.kind == "auto" and memory.heap_cap:
        raise ValueError(
            "memory.heap_cap is true but memory.budget is auto; a cap needs a size, or a fraction "
            "of this machine: write for example memory.budget=8GiB, or memory.heap_cap=false"
        )


def _run(job: Job, *, stop: StopRequest, show_progress: bool) -> RunSummary:
    directory = job.directory
    journal = JournalWriter(directory.journal)
    fit = Fit(job, journal=journal, stop=stop, notify=_notice, show_progress=show_progress)
    try:
        directory.recipe.write_text(format_recipe(job.recipe), encoding="utf-8")
        fit.run()
        if job.is_resumed and not fit.recorder.finished_batches:
            _notice(
                f"{directory.path} had finished; raise training.epochs or training.max_steps to "
                "train it further"
            )
    except BaseException as error:
        journal.close()
        if fit.recorder.is_empty and isinstance(error, (ValueError, KeyboardInterrupt)):
            directory.discard()
            raise
        if isinstance(error, KeyboardInterrupt):
            return summarize(read_journal(directory.journal))
        raise _failure(error, directory) from error
    journal.close()
    return summarize(read_journal(directory.journal))


def _failure(error: BaseException, directory: RunDirectory) -> RuntimeError:
    """What the user is told; the traceback stays in the run directory."""
    details = directory.path / "traceback.txt"
    details.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    text = str(error) or type(error).__name__
    return RuntimeError(f"training failed: {text}\n(details in {details})")


def _notice(text: str) -> None:
    print(f"rematic: {text}", file=sys.stderr, flush=True)

"""Trains a recipe with Lightning."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rematic.journal import JournalWriter, RunSummary, read_journal, summarize
from rematic.memory import use_mapping_malloc
from rematic.recipes import Recipe, format_recipe
from rematic.training.data import TrainingData, load_data
from rematic.training.fit import Fit, Job, trains_on_cpu
from rematic.training.interrupts import StopRequest
from rematic.training.model_config import build_config
from rematic.training.model_size import ModelSize, check_budget
from rematic.training.optimization import check_optimizer
from rematic.training.prepared_model import measure_recipe, prepare_empty_model
from rematic.training.ranks import NoJournal, Ranks, find_ranks
from rematic.training.resume import check_checkpoint, check_resumable, steps_before
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
    allow_code: bool = False,
) -> RunSummary:
    """Trains a recipe in this process and writes its run directory.

    With `memory.heap_cap` the heap of this process is capped while it trains; the command
    `rematic train` gives it a process of its own for that.

    Args:
        recipe: What to train.
        resume: Directory of a run to go on with; None: a new one.
        stop: Watches for Ctrl-C already; None: it is watched here.
        show_progress: Whether stderr shows how it goes.
        allow_code: Whether `_target_` may name a class outside the allow-list.

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
    job = _prepare(recipe, resume=resume, allow_code=allow_code)
    watched = StopRequest(notify=_notice) if stop is None else contextlib.nullcontext(stop)
    with watched as request:
        return _run(job, stop=request, show_progress=show_progress)


def _prepare(recipe: Recipe, *, resume: str | Path | None, allow_code: bool) -> Job:
    """Checks all that can be checked before weights exist, then makes the run directory."""
    ranks = find_ranks(recipe)
    notify = _told_once(ranks)
    _check_attention(recipe)
    check_optimizer(
        recipe.training,
        allow_code=allow_code,
        has_vectors=recipe.tuning.method not in ("lora", "qlora")
        or bool(recipe.tuning.modules_to_save),
        device=None if trains_on_cpu(recipe) else torch.accelerator.current_accelerator(),
    )
    data = load_data(recipe, rank=ranks.rank, num_ranks=ranks.num_ranks)
    config = build_config(
        recipe.model,
        max_length=data.max_length,
        num_tokens=data.num_tokens,
        num_labels=data.num_labels,
        marks=data.tokenizer.marks(),
    )
    size = measure_recipe(recipe, config=config, max_length=data.max_length, allow_code=allow_code)
    _check_memory(recipe, size)
    directory = _open_directory(recipe, ranks, resume=resume)
    if resume is not None:
        check_resumable(directory, recipe, corpus=data.corpus, encoded=data.encoded, notify=notify)
        check_checkpoint(directory, prepare_empty_model(recipe, config=config))
        step = steps_before(directory)
        notify(f"{directory.path} goes on" + ("" if step is None else f" after step {step}"))
    for text in (*data.notices(recipe.data), *_too_few(recipe, data)):
        notify(text)
    return Job(
        recipe=recipe,
        data=data,
        config=config,
        size=size,
        directory=directory,
        ranks=ranks,
        is_resumed=resume is not None,
        allow_code=allow_code,
    )


def _open_directory(recipe: Recipe, ranks: Ranks, *, resume: str | Path | None) -> RunDirectory:
    if resume is not None:
        return open_run_directory(resume)
    if ranks.run_path is not None:
        return RunDirectory(path=Path(ranks.run_path))
    return create_run_directory(recipe.run.dir, name=recipe.run.name or recipe.name)


def _check_attention(recipe: Recipe) -> None:
    chosen = recipe.model.attention
    if trains_on_cpu(recipe) and chosen.startswith(("flash", "flex")):
        raise ValueError(
            f"model.attention is {chosen!r}, which has no backward on a CPU, where this recipe is "
            "trained; expected eager or sdpa there: write auto"
        )


def _check_memory(recipe: Recipe, size: ModelSize) -> None:
    memory = recipe.memory
    if memory.probe == "cuda" and trains_on_cpu(recipe):
        raise ValueError(
            "memory.probe is cuda, but this machine has no such device and the recipe is trained "
            "on the CPU; expected host or simulated there: write auto"
        )
    # a rank holds a part of a sharded model
    if memory.budget.kind == "absolute" and recipe.distributed.strategy != "fsdp2":
        check_budget(size, budget_bytes=int(memory.budget.value or 0))
    if memory.budget.kind == "auto" and memory.heap_cap:
        raise ValueError(
            "memory.heap_cap is true but memory.budget is auto; a cap needs a size, or a fraction "
            "of this machine: write for example memory.budget=8GiB, or memory.heap_cap=false"
        )


def _run(job: Job, *, stop: StopRequest, show_progress: bool) -> RunSummary:
    directory = job.directory
    first = job.ranks.is_first
    journal: JournalWriter | NoJournal = JournalWriter(directory.journal) if first else NoJournal()
    fit = Fit(
        job, journal=journal, stop=stop, notify=_notice, show_progress=show_progress and first
    )
    try:
        if first and not job.is_resumed:  # else when it trains
            directory.recipe.write_text(format_recipe(job.recipe), encoding="utf-8")
        fit.run()
        if job.is_resumed and first and not fit.recorder.finished_batches:
            _notice(
                f"{directory.path} had finished; raise training.epochs or training.max_steps to "
                "train it further"
            )
    except BaseException as error:
        journal.close()
        if fit.recorder.is_empty and isinstance(error, (ValueError, KeyboardInterrupt)):
            directory.discard()  # nothing of a run that is resumed
            raise
        if isinstance(error, KeyboardInterrupt):
            return summarize(read_journal(directory.journal))
        raise _failure(error, directory, ranks=job.ranks) from error
    journal.close()
    return summarize(read_journal(directory.journal))


def _failure(error: BaseException, directory: RunDirectory, *, ranks: Ranks) -> RuntimeError:
    """What the user is told; the traceback stays in the run directory."""
    details = directory.path / f"traceback{'' if ranks.is_first else ranks.rank}.txt"
    details.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    text = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return RuntimeError(f"training failed: {text}\n(details in {details})")


def _too_few(recipe: Recipe, data: TrainingData) -> Iterator[str]:
    """What to know of an epoch that is shorter than an optimizer step."""
    wanted, there = recipe.training.accumulate, len(data.loader)
    if wanted <= there:
        return
    yield (
        f"training.accumulate is {wanted}, but an epoch has {there} micro-batches: each epoch is "
        f"one step of the optimizer, whose gradients are divided by {wanted} all the same; write "
        f"at most training.accumulate={there}"
    )


def _told_once(ranks: Ranks) -> Callable[[str], None]:
    """Of several processes one tells."""
    return _notice if ranks.is_first else lambda text: None


def _notice(text: str) -> None:
    print(f"rematic: {text}", file=sys.stderr, flush=True)

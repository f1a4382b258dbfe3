"""The processes of the demo: each trains the documents one way and prints JSON lines.

A process of its own per part, because a heap cap holds for a whole process, and because the
part that keeps everything is meant to die.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematic.journal import describe_plan
from rematic.memory import capped_heap, is_out_of_memory, use_mapping_malloc, warm_up_threads
from rematic.training.demo_figures import (
    KEPT,
    PLAIN,
    RECOMPUTED,
    REMATIC,
    DocumentFigures,
    Failure,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rematic.recipes import Recipe
    from rematic.session import Session
    from rematic.training.batches import Batch
    from rematic.training.plain_loop import PlainLoop


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a part of the demo trains."""

    recipe: Recipe
    """The recipe of the demo."""
    names: tuple[str, ...]
    """Names of the documents, in the order of training."""
    documents: tuple[tuple[int, ...], ...]
    """Their token ids."""
    budget_bytes: int
    """Bytes that may be in use."""

    @property
    def max_length(self) -> int:
        """Longest document, in tokens."""
        return max(map(len, self.documents))


def main(argv: Sequence[str]) -> int:
    """Runs one part: `plain`, `kept` or `compared`; the other arguments make the recipe."""
    use_mapping_malloc()  # before torch allocates anything
    part, name, *overrides = argv
    work = load_work(name, overrides)
    parts: dict[str, Callable[[Work], None]] = {
        PLAIN: train_plain,
        KEPT: train_kept,
        "compared": train_compared,
    }
    parts[part](work)
    return 0


def load_work(name: str, overrides: Sequence[str]) -> Work:
    """Reads recipe and documents, and sets the threads.

    Raises:
        ValueError: The recipe cannot be used for the demo.
    """
    import torch

    from rematic.recipes import load_recipe
    from rematic.training.data import load_data

    recipe = load_recipe(name, overrides)
    if recipe.memory.budget.kind != "absolute":
        raise ValueError(
            f"memory.budget is {recipe.memory.budget}; the demo caps the heap at it and needs a "
            "size, for example memory.budget=700MiB"
        )
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    data = load_data(recipe)
    order = data.loader.order(0)
    examples = [data.loader.examples[index] for index in order]
    work = Work(
        recipe=recipe,
        names=tuple(data.encoded.names[index] for index in order),
        documents=tuple(example.ids for example in examples),
        budget_bytes=int(recipe.memory.budget.value or 0),
    )
    _tell(
        "work",
        lengths=[len(document) for document in work.documents],
        budget_bytes=work.budget_bytes,
        max_length=recipe.data.max_length,
        corpus_sha256=data.corpus.sha256,
    )
    return work


def train_plain(work: Work) -> None:
    """The reference: nothing attached, no cap."""
    loop = _make_loop(work)
    for number, batch in _batches(work):
        _tell_document(PLAIN, _train_one(loop, number, batch, run=loop.forward_backward))


def train_kept(work: Work) -> None:
    """The same under the cap, until an allocation fails."""
    loop = _make_loop(work)
    warm_up_threads()
    with capped_heap(work.budget_bytes - loop.idle_bytes) as cap:
        for number, batch in _batches(work):
            try:
                figures = _train_one(loop, number, batch, run=loop.forward_backward)
            except RuntimeError as error:
                cap.release_ballast()
                if not is_out_of_memory(error):
                    raise
                _tell_failure(KEPT, work, number, error)
                return
            _tell_document(KEPT, figures)


def train_compared(work: Work) -> None:
    """Everything recomputed and rematic, document by document under one cap.

    Each has a model and an optimizer of its own; the cap leaves each the room over idle that it
    would have alone. Who goes first alternates.
    """
    from rematic import attach

    loops = {way: _make_loop(work) for way in (RECOMPUTED, REMATIC)}
    warm_up_threads()
    sessions = {
        way: attach(
            loop.model,
            optimizer=loop.optimizer,
            recipe=_recipe_of(way, work.recipe),
            budget=work.budget_bytes,
            probe="host",
        )
        for way, loop in loops.items()
    }
    with capped_heap(work.budget_bytes - loops[REMATIC].idle_bytes):
        for number, batch in _batches(work):
            for way in _who_goes_first(number):
                _train_attached(way, loops[way], sessions[way], number, batch, work=work)


def _train_attached(
    way: str, loop: PlainLoop, session: Session, number: int, batch: Batch, *, work: Work
) -> None:
    def run(batch: Batch) -> Tensor:
        return session.run(loop.forward_backward, batch)

    try:
        figures = _train_one(loop, number, batch, run=run)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        loop.optimizer.zero_grad(set_to_none=True)
        _tell_failure(way, work, number, error)
        return
    step = session.last_step
    assert step is not None  # the step has just ended
    _tell_document(
        way,
        dataclasses.replace(
            figures,
            peak_bytes=step.peak_bytes,
            budget_bytes=step.budget_bytes,
            evictions=step.evictions,
            op_retries=step.op_retries,
            unit_retries=step.unit_retries,
            plan=describe_plan(step.plan),
        ),
    )


def _train_one(
    loop: PlainLoop, number: int, batch: Batch, *, run: Callable[[Batch], Tensor]
) -> DocumentFigures:
    loop.start_document(number)
    started_seconds = time.perf_counter()
    loss = run(batch)
    loop.update()
    seconds = time.perf_counter() - started_seconds
    return DocumentFigures(
        number=number,
        length=batch["input_ids"].shape[1],
        loss_hex=float(loss).hex(),
        seconds=seconds,
    )


def _make_loop(work: Work) -> PlainLoop:
    from rematic.training.plain_loop import PlainLoop

    return PlainLoop(work.recipe, max_length=work.max_length)


def _batches(work: Work) -> Iterator[tuple[int, Batch]]:
    from rematic.training.batches import make_batch

    for number, ids in enumerate(work.documents):
        yield number, make_batch(ids)


def _recipe_of(way: str, recipe: Recipe) -> Recipe:
    policy = (
        dataclasses.replace(recipe.policy, start="recompute")
        if way == RECOMPUTED
        else recipe.policy
    )
    return dataclasses.replace(recipe, policy=policy)


def _who_goes_first(number: int) -> tuple[str, str]:
    return (RECOMPUTED, REMATIC) if number % 2 == 0 else (REMATIC, RECOMPUTED)


def _tell_document(way: str, figures: DocumentFigures) -> None:
    _tell("document", way=way, figures=dataclasses.asdict(figures))


def _tell_failure(way: str, work: Work, number: int, error: RuntimeError) -> None:
    failure = Failure(
        number=number,
        name=work.names[number],
        length=len(work.documents[number]),
        error=str(error).splitlines()[0] if str(error) else type(error).__name__,
    )
    _tell("failure", way=way, figures=dataclasses.asdict(failure))


def _tell(kind: str, **values: object) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        _tell("refused", message=str(error))
        sys.exit(1)
    except KeyboardInterrupt:  # the parent says what happened
        sys.exit(1)

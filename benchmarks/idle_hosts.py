"""The loops of `idle_overhead.py`: one micro-batch of each host, with rematic and without.

A host is a function in `HOSTS`. It is given a model and whether to attach it, and returns a loop:
what runs one micro-batch, and what ends it. Both loops of a pair go through the host, so that the
ratio shows what rematic adds to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import rematic
from benchmarks.idle_lightning import start_fit

UNLIMITED = "64GiB"
"""A budget that is never near."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training of which one micro-batch runs at a time."""

    step: Callable[[], object]
    """Forward, backward, optimizer."""

    close: Callable[[], object]
    """Gives back what was attached."""


MakeLoop = Callable[[nn.Module, Batch, bool], Loop]
"""Takes the model, its batch, and whether rematic is attached."""


def plain_loop(model: nn.Module, batch: Batch, attached: bool) -> Loop:
    """A loop of PyTorch alone, under `session.step`."""
    optimizer = _adam(model)
    session = rematic.attach(model, optimizer, budget=UNLIMITED) if attached else None

    def forward_backward() -> None:
        model(**batch).loss.backward()

    def step() -> None:
        if session is None:
            forward_backward()
        else:
            with session.step(batch):
                forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(step=step, close=_nothing if session is None else session.detach)


def run_loop(model: nn.Module, batch: Batch, attached: bool) -> Loop:
    """A loop of PyTorch alone, whose micro-batches `session.run` can repeat."""
    optimizer = _adam(model)
    session = rematic.attach(model, optimizer, budget=UNLIMITED) if attached else None

    def forward_backward(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss

    def step() -> None:
        if session is None:
            forward_backward(batch)
        else:
            session.run(forward_backward, batch)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(step=step, close=_nothing if session is None else session.detach)


def accelerate_loop(model: nn.Module, batch: Batch, attached: bool) -> Loop:
    """A loop of Accelerate, under `@plugin.step`, which can repeat it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plugin = rematic.RecomputePlugin(budget=UNLIMITED, enabled=attached).attach(accelerator)
    prepared, optimizer = accelerator.prepare(model, _adam(model))

    @plugin.step
    def forward_backward(batch: Batch) -> None:
        accelerator.backward(prepared(**batch).loss)

    def step() -> None:
        with accelerator.accumulate(prepared):
            forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()

    return Loop(step=step, close=plugin.detach)


def trainer_loop(model: nn.Module, batch: Batch, attached: bool) -> Loop:
    """`training_step` of a Trainer of Transformers, as its own loop calls it."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments)
    plugin = rematic.RecomputePlugin(budget=UNLIMITED, enabled=attached).attach_trainer(trainer)
    trainer.optimizer = _adam(model)
    prepared, optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
    num_items = torch.tensor(batch["labels"].numel())

    def step() -> None:
        trainer.training_step(prepared, dict(batch), num_items)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(step=step, close=plugin.detach)


def lightning_loop(kind: str) -> MakeLoop:
    """A fit of Lightning on one device, under rematic's strategy or under Lightning's own."""

    def make(model: nn.Module, batch: Batch, attached: bool) -> Loop:
        fit = start_fit(model, batch, attached, kind)
        return Loop(step=fit.step, close=fit.close)

    return make


HOSTS: Mapping[str, MakeLoop] = {
    "plain": plain_loop,
    "run": run_loop,
    "accelerate": accelerate_loop,
    "trainer": trainer_loop,
    "lightning": lightning_loop("one"),
    "lightning-ddp": lightning_loop("ddp"),
    "lightning-fsdp2": lightning_loop("fsdp2"),
}
"""The hosts by the name that `--host` takes."""


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


def _nothing() -> None:
    return None

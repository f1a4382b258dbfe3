"""A loop of Lightning Fabric with `attach` and `session.run`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import rematic
from tests.step_models import Block, different, everything, make_batches, make_tied_model

PENDING: list[int] = []
"""Micro-batches that will run out of memory; outside of the model, whose state a retry restores."""


def train(precision: str, accumulate: int, *, policy: str | None) -> tuple[dict[str, Any], Any]:
    """Six micro-batches; returns all that must have the same bits, and the session."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    plain = make_tied_model()
    stepper = torch.optim.AdamW(plain.parameters(), 1e-2)
    session = None
    if policy is not None:
        session = rematic.attach(plain, stepper, policy=policy, budget="64GiB")
    model, optimizer = fabric.setup(plain, stepper)
    torch.manual_seed(3)
    losses = []

    def forward_backward(ids: torch.Tensor, number: int) -> torch.Tensor:
        loss = model(ids)
        fabric.backward(loss / accumulate)
        if number in PENDING:
            PENDING.remove(number)
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return loss.detach()

    for number, ids in enumerate(2 * make_batches()):
        is_last = number % accumulate == accumulate - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            if session is None:
                losses.append(forward_backward(ids, number))
            else:
                losses.append(session.run(lambda x, n=number: forward_backward(x, n), ids))
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.detach()
    return everything(plain, losses), session


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore:The model .* no_backward_sync")
def test_it_is_the_plain_loop(precision: str, accumulate: int) -> None:
    wanted, _ = train(precision, accumulate, policy=None)
    for policy in ("recompute", "selective", "planned"):
        found, session = train(precision, accumulate, policy=policy)
        assert different(found, wanted) == [], policy
        assert session.num_steps == 6


def test_a_micro_batch_that_runs_out_of_memory_runs_again() -> None:
    wanted, _ = train("32-true", 3, policy=None)
    PENDING.extend((1, 5))
    found, session = train("32-true", 3, policy="keep")
    assert different(found, wanted) == []
    assert PENDING == []
    assert session.num_steps == 6


def test_the_model_is_left_as_it_was() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = make_tied_model()
    names = list(plain.state_dict())
    session = rematic.attach(plain, policy="recompute", budget="64GiB")
    model = fabric.setup(plain)
    assert list(model.state_dict()) == names
    session.detach()
    assert not any(isinstance(m, Block) and "forward" in vars(m) for m in plain.modules())
    assert isinstance(model.module, nn.Module)

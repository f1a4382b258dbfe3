"""Callers that change the input of a unit in place when it has run: `x += block(x)`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from rematic.activations import Engine
from rematic.policy import Keep, Offload, Plan, Recompute, RecomputeOffload, Selective
from tests.activations.parity import Outcome, differences, read_outcome

ACTIONS = (Recompute(), Selective(), RecomputeOffload(), Offload(), Keep())


class Block(nn.Module):
    """Saves nothing of its input itself: plain autograd lets it be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.drop(x * 2)))) * scale


Form: TypeAlias = Callable[[nn.ModuleList, torch.Tensor, torch.Tensor], None]


def _in_turn(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for block in blocks:
        x += block(x, scale)


def _side_by_side(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    first, second = blocks[0](x, scale), blocks[1](x, scale)
    x += first
    x += second
    x += blocks[2](x, scale)


def _all_at_last(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for output in [block(x, scale) for block in blocks]:
        x += output


def _views(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for block in blocks:
        x += block(x.view(2, 2, 8), scale).view(4, 8)


def _a_part(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for block in blocks:
        x[:2] += block(x[:2], scale)


def _transposed(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for block in blocks:
        x.t().add_(block(x, scale).t())


def _detached(blocks: nn.ModuleList, x: torch.Tensor, scale: torch.Tensor) -> None:
    for block in blocks:
        output = block(x, scale)
        x.detach().mul_(0.5)
        x += output


FORMS = (_in_turn, _side_by_side, _all_at_last, _views, _a_part, _transposed, _detached)


class Residual(nn.Module):
    def __init__(self, shared: bool, form: Form = _in_turn) -> None:
        super().__init__()
        self.form = form
        blocks = [Block() for _ in range(3)]
        self.blocks = nn.ModuleList([blocks[0]] * 3 if shared else blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        self.form(self.blocks, x, torch.ones(8))
        return x


def step(model: nn.Module) -> Outcome:
    torch.manual_seed(3)
    loss = model(torch.randn(4, 8)).pow(2).sum()
    loss.backward()
    return read_outcome(model, [loss])


@pytest.mark.parametrize("shared", [False, True], ids=["blocks", "one block"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_an_input_that_is_changed_after_the_call(
    action: Any, shared: bool, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Residual(shared).train()

    wanted = step(make())
    model = make()
    engine = Engine(model, ["blocks.*"], scratch_dir=tmp_path)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    with caplog.at_level(logging.WARNING, logger="rematic"):
        for _ in range(3):
            model.zero_grad()
            assert differences(step(model), wanted) == []
    starts_evicted = not isinstance(action, (Keep, Offload))
    assert ("is changed in place after its call" in caplog.text) == starts_evicted
    # in the first step what saw the change is kept; each later step replays each call
    first = 2 if shared else 0
    assert engine.ledger.counts.replays.total() == (6 + first if starts_evicted else 0)
    engine.detach()


@pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize("action", [Recompute(), RecomputeOffload()], ids=lambda a: a.name)
def test_every_form_of_it(form: Form, action: Any, tmp_path: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Residual(False, form).train()

    wanted = step(make())
    model = make()
    engine = Engine(model, ["blocks.*"], scratch_dir=tmp_path)
    engine.apply(Plan(actions=(action,) * 3))
    for _ in range(3):
        model.zero_grad()
        assert differences(step(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 6
    engine.detach()


def test_an_input_that_is_not_changed_is_not_copied() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))))
    engine = Engine(model)
    engine.apply(Plan(actions=(Recompute(),) * 3))
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        loss = model(x).sum()
        records = engine.ledger.records()
        assert records[0].arguments.aliases()[0].data_ptr() == x.data_ptr()
        assert engine.ledger.resident_bytes() == 0
        loss.backward()

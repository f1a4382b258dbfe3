"""Inputs that several units receive stay where they are when inputs are moved."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import Engine
from rematic.policy import Plan, Recompute, RecomputeOffload, Tile
from rematic.stash import DiskStash
from tests.activations.parity import differences, read_outcome


class Block(nn.Module):
    """Adds a bias that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x + bias)))


class Stack(nn.Module):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.bias = nn.Linear(8, 8)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        x = x * 1.5
        for block in self.blocks:
            if self.in_place:
                x += block(x, bias)
            else:
                x = block(x, bias)
        return x


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rematic.activations.stash_places.DiskStash", functools.partial(DiskStash, min_bytes=1)
    )


def make(**settings: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**settings).train()


def step(model: nn.Module, engine: Engine | None = None) -> tuple[Any, list[list[bool]]]:
    """Returns what a step leaves behind, and for each record which of its inputs have moved."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.randn(2, 6, 8).requires_grad_()).square().sum()
    records = [] if engine is None else engine.ledger.records()
    moved = [[a.handle is not None for a in r.arguments.tensors()] for r in records]
    loss.backward()
    return read_outcome(model, [loss]), moved


@pytest.mark.parametrize("in_place", [False, True], ids=["x = block(x)", "x += block(x)"])
def test_a_tensor_that_all_units_receive_is_not_moved(in_place: bool, tmp_path: Any) -> None:
    wanted, _ = step(make(in_place=in_place))
    model = make(in_place=in_place)
    engine = Engine(model, ["blocks.*"], scratch_dir=tmp_path)
    engine.apply(Plan(actions=(RecomputeOffload(),) * 3))
    for number in range(3):
        found, moved = step(model, engine)
        assert differences(found, wanted) == []
        if number:  # the first step shows what is shared
            assert moved == [[True, False]] * 3
    engine.detach()


def test_it_is_known_from_steps_in_which_nothing_moved(tmp_path: Any) -> None:
    model = make()
    engine = Engine(model, ["blocks.*"], scratch_dir=tmp_path)
    engine.apply(Plan(actions=(Recompute(),) * 3))
    step(model, engine)
    engine.apply(Plan(actions=(Recompute(), RecomputeOffload(), RecomputeOffload())))
    assert step(model, engine)[1] == [[False, False], [True, False], [True, False]]
    engine.detach()


def test_slices_of_a_tiled_unit_do_not_share_their_input(tmp_path: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    engine = Engine(model, ["*"], scratch_dir=tmp_path)
    engine.apply(Plan(actions=(Tile(num_tiles=2),) * 3))
    step(model, engine)
    engine.apply(Plan(actions=(RecomputeOffload(),) * 3))
    assert step(model, engine)[1] == [[True]] * 3
    engine.detach()

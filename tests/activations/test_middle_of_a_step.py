"""Detaching and copying in the middle of a forward, before backward, in the middle of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rematic.activations import Engine
from rematic.policy import Keep, Offload, Plan, Recompute, RecomputeOffload, Selective
from tests.activations.blocks import gradients, make_input, make_model
from tests.activations.parity import same_bits

ACTIONS = (Keep(), Selective(), Recompute(), RecomputeOffload(), Offload())


def step(model: Any, where: str, act: Callable[[], object]) -> None:
    """Runs a step and acts once, where it is told to."""
    model.zero_grad()
    if where == "in forward":
        handle = model.blocks[1].register_forward_hook(lambda *_: act() and None)
    loss = model(make_input())
    if where == "between":
        act()
    if where == "in backward":
        handle = model.blocks[2].up.weight.register_hook(lambda _: act() and None)
    loss.backward()
    if where != "between":
        handle.remove()


def same_gradients(model: nn.Module) -> bool:
    plain = make_model()
    plain(make_input()).backward()
    return all(map(same_bits, gradients(model), gradients(plain)))


@pytest.mark.parametrize("where", ["in forward", "between", "in backward"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_detaching(action: Any, where: str, tmp_path: Path) -> None:
    model = make_model()
    engine = Engine(model, scratch_dir=tmp_path)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    step(model, "between", lambda: None)
    step(model, where, engine.detach)
    assert same_gradients(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert list(tmp_path.iterdir()) == [], "no file of the disk pool is left"


@pytest.mark.parametrize("where", ["in forward", "between", "in backward"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_copying(action: Any, where: str, tmp_path: Path) -> None:
    model, copies = make_model(), []
    engine = Engine(model, scratch_dir=tmp_path)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    step(model, "between", lambda: None)
    step(model, where, lambda: copies.append(copy.deepcopy(model)))
    assert same_gradients(model)
    for other in (*copies, model):
        step(other, "between", lambda: None)
        assert same_gradients(other)
    engine.detach()

"""What happens to an attached model in a training script: averages, new weights, a second fit."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rematic
from tests.activations.blocks import make_input, make_model


def train(model: nn.Module, steps: int = 3, averaged: AveragedModel | None = None) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        model(make_input()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(model)
    return model


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)


def test_a_moving_average_is_plain_and_follows_the_model() -> None:
    def averages(model: nn.Module) -> AveragedModel:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        train(model, averaged=averaged)
        return averaged

    wanted = averages(make_model())
    model = make_model()
    session = rematic.attach(model, policy="recompute")
    found = averages(model)
    assert equal(found, wanted)
    assert all("forward" not in vars(m) or m.forward.__self__ is m for m in found.modules())
    before = [unit.num_forwards for unit in session._engine.units]
    found(make_input()).backward()
    assert [unit.num_forwards for unit in session._engine.units] == before
    session.detach()


def test_weights_that_are_replaced_after_attaching_are_used_and_trained() -> None:
    def changed(model: nn.Module) -> nn.Module:
        train(model, 1)
        generator = torch.Generator().manual_seed(7)
        block = model.blocks[1]
        block.up.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
        block.down.bias = None
        block.up.weight.data = block.up.weight.data.clone()
        return train(model)

    wanted = changed(make_model())
    for policy in ("keep", "recompute", "selective", "offload"):
        model = make_model()
        session = rematic.attach(model, policy=policy)
        assert equal(changed(model), wanted)
        session.detach()


def test_weights_may_be_frozen_cast_and_loaded_between_steps() -> None:
    def changed(model: nn.Module) -> nn.Module:
        train(model, 1)
        model.blocks[0].requires_grad_(False)
        train(model, 1)
        model.double()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(make_input().double()).backward()
        optimizer.step()
        model.float()
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        return train(model, 1)

    wanted = changed(make_model())
    model = make_model()
    session = rematic.attach(model, policy="recompute")
    assert equal(changed(model), wanted)
    session.detach()


def test_attaching_twice_is_refused_and_a_second_fit_is_not() -> None:
    wanted = train(train(make_model(), 2), 2)
    model = make_model()
    first = rematic.attach(model, policy="recompute")
    train(model, 2)
    with pytest.raises(ValueError, match="is already managed by a session"):
        rematic.attach(model, policy="recompute")
    first.detach()
    second = rematic.attach(model, policy="selective")
    train(model, 2)
    assert equal(model, wanted)
    assert second._engine.units[0].num_forwards == 2
    second.detach()
    assert all("forward" not in vars(part) for part in model.modules())


def _deepcopied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied_by", [_deepcopied, _saved])
def test_a_copy_taken_in_the_middle_goes_on_by_itself(copied_by: Any) -> None:
    """Between forward and backward, with records alive and modules in use."""
    wanted = train(make_model(), 1)
    model = make_model()
    session = rematic.attach(model, policy="recompute")
    with session.step(make_input()):
        loss = model(make_input())
        copied = copied_by(model)
        loss.backward()
    other = rematic.attach(copied, policy="keep")
    assert equal(train(copied, 1), wanted)
    assert session._engine.units[0].num_forwards == 1
    other.detach()
    session.detach()
    gc.collect()
    assert all("forward" not in vars(p) or p.forward.__self__ is p for p in copied.modules())

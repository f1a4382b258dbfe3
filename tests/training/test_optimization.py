from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rematic.recipes import TrainingConfig
from rematic.training.optimization import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    create_optimizer_state,
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_decays_matrices_only() -> None:
    optimizer = build_optimizer(make_model().parameters(), TrainingConfig(weight_decay=0.5))
    decays = {
        group["weight_decay"]: {p.ndim for p in group["params"]} for group in optimizer.param_groups
    }
    assert decays == {0.5: {2}, 0.0: {1}}


def test_leaves_frozen_parameters_out() -> None:
    model = make_model()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), TrainingConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


@pytest.mark.parametrize(
    ("warmup_steps", "rates"), [(0, [1, 1, 1, 1]), (3, [0.25, 0.5, 0.75, 1, 1])], ids=str
)
def test_the_rate_rises_and_stays(warmup_steps: int, rates: list[float]) -> None:
    training = TrainingConfig(learning_rate=2.0, warmup_steps=warmup_steps)
    optimizer = build_optimizer(make_model().parameters(), training)
    schedule = build_schedule(optimizer, training)
    seen = []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == [2.0 * rate for rate in rates]


def test_clips_the_norm_of_all_gradients_together() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value])
    clip_gradients(parameters, None)
    assert [p.grad.item() for p in parameters if p.grad is not None] == [3.0, 4.0]
    clip_gradients(parameters, 1.0)
    norm = sum(p.grad.item() ** 2 for p in parameters if p.grad is not None) ** 0.5
    assert norm == pytest.approx(1.0, rel=1e-5)


def test_state_made_ahead_changes_no_bit_of_the_training() -> None:
    ahead, lazy = make_model(), make_model()
    optimizers = [build_optimizer(m.parameters(), TrainingConfig()) for m in (ahead, lazy)]
    before = copy.deepcopy(ahead.state_dict())
    create_optimizer_state(optimizers[0])
    assert all(torch.equal(before[name], value) for name, value in ahead.state_dict().items())
    assert all(parameter.grad is None for parameter in ahead.parameters())
    assert len(optimizers[0].state) == len(list(ahead.parameters()))
    for model, optimizer in zip((ahead, lazy), optimizers, strict=True):
        train(model, optimizer, steps=5)
    assert all(map(torch.equal, ahead.parameters(), lazy.parameters()))

"""Bytes of the tensors of a training."""

from __future__ import annotations

import torch
from torch import nn

from rematic.training_tensors import existing_bytes, gradient_bytes, pending_gradient_bytes


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def test_gradients_that_exist_and_that_are_to_come() -> None:
    model = _model()
    parameters = list(model.parameters())
    trainable = (4 + 4 + 8 + 2) * 4
    assert gradient_bytes(parameters) == 0
    assert pending_gradient_bytes(parameters) == trainable
    model(torch.ones(3, 4)).sum().backward()
    assert gradient_bytes(parameters) == trainable
    assert pending_gradient_bytes(parameters) == 0


def test_everything_that_exists_is_counted_once() -> None:
    network, model = _model(), nn.Module()
    model.network, model.tied = network, network[2]
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    weights, buffers, trainable = 34 * 4, (4 + 4) * 4 + 8, 18 * 4
    assert existing_bytes(model, [optimizer]) == weights + buffers
    network(torch.ones(3, 4)).sum().backward()
    assert existing_bytes(model, [optimizer]) == weights + buffers + trainable
    optimizer.step()
    states = 2 * trainable + 4 * 4  # two averages, and four counts of steps
    assert existing_bytes(model, [optimizer]) == weights + buffers + trainable + states

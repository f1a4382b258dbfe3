"""What code names is found, and no more than that."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from rematic.transaction.reached import ReachedByStep, reached_parts

HEAD = nn.Linear(1, 1)
OTHER = nn.Linear(1, 1)
DRAW = torch.Generator()


def helper(x: torch.Tensor) -> torch.Tensor:
    return HEAD(x) * torch.rand(1, generator=DRAW)


class Trainer:
    def __init__(self) -> None:
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.weight = torch.ones(1, requires_grad=True)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.later(x) * self.numpy.random()

    def later(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.weight


def test_globals_that_functions_name_are_found_and_others_are_not() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    found = ReachedByStep(step)
    assert found.modules == [HEAD]
    assert found.generators == [DRAW]
    assert not any(module is OTHER for module in found.modules)


def test_attributes_that_methods_name_are_found_and_others_are_not() -> None:
    trainer = Trainer()
    for step in (trainer.step, functools.partial(trainer.step), lambda x: trainer.step(x)):
        found = ReachedByStep(step)
        assert found.modules == [trainer.used]
        assert found.generators == [trainer.numpy]
        assert [id(leaf) for leaf in found.leaves] == [id(trainer.weight)]


def test_iterators_count_where_the_code_takes_the_next() -> None:
    batches: Any = iter([1])

    def takes() -> int:
        return next(batches)

    def looks() -> bool:
        return batches is None

    assert ReachedByStep(takes).iterators == ["batches"]
    assert ReachedByStep(looks).iterators == []
    assert ReachedByStep(None).iterators == []


def test_what_is_around_the_model_and_what_cannot_change_are_left_out() -> None:
    """A wrapper of several ranks keeps its state itself, and waits for the others by it."""
    model, teacher = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)).eval().requires_grad_(False)
    wrapper, loss = nn.Sequential(nn.Sequential(model)), nn.Sequential(nn.BatchNorm1d(1))
    known = set(map(id, model.modules()))
    assert reached_parts([wrapper, teacher, loss, loss], known) == [*loss.modules()]

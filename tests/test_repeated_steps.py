"""What a step reaches beside its model and its batch is as before when it runs again."""

from __future__ import annotations

import collections
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rematic
from rematic.recipes import PolicyConfig, Recipe
from rematic.transaction import ModuleSnapshot, StepTransaction
from rematic.transaction.value_state import ValueState
from tests.step_models import TiedModel, different, everything, make_batches, make_tied_model

STEP_ALONE = Recipe(policy=PolicyConfig(op_retry="never"))
Point = Callable[[], None]
"""A place where memory may run out."""


@dataclass(frozen=True)
class Case:
    """A step, and what it leaves outside of the model."""

    step: Callable[[Any], torch.Tensor]
    state: Callable[[], Any]
    trained: tuple[torch.Tensor, ...] = ()
    """Tensors that an optimizer of the session trains with the model."""
    batch: Callable[[torch.Tensor], Any] = lambda ids: ids


def grad_mode(model: TiedModel, point: Point) -> Case:
    def step(ids: torch.Tensor) -> torch.Tensor:
        scale = model.blocks[0].down.bias.sum()
        torch.set_grad_enabled(False)
        with torch.random.fork_rng():
            model(ids)
        point()
        torch.set_grad_enabled(True)
        loss = model(ids) * scale.exp()
        loss.backward()
        return loss.detach()

    return Case(step, torch.is_grad_enabled)


def other_switches(model: TiedModel, point: Point) -> Case:
    def step(ids: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0, 1, 3)
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        point()
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_dtype(torch.float32)
        loss = model(ids) * weight.sum()
        loss.backward()
        return loss.detach()

    return Case(step, lambda: (torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))


def _state_of(module: nn.Module) -> Any:
    gradients = [None if p.grad is None else p.grad.tolist() for p in module.parameters()]
    return gradients, [b.tolist() for b in module.buffers()]


def loss_of_a_closure(model: TiedModel, point: Point) -> Case:
    head = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = head(model(ids) * torch.linspace(1, 2, 4)[:, None]).square().mean()
        point()
        loss.backward()
        point()
        return loss.detach()

    return Case(step, lambda: _state_of(head))


class Loop:
    """A loss with weights as the attribute of an object, used by a method of it."""

    def __init__(self, model: TiedModel, point: Point) -> None:
        self.model, self.point = model, point
        self.parts = SimpleNamespace(head=nn.Linear(1, 3))

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.finish(self.parts.head(self.model(ids)[None]).square().mean())

    def finish(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.point()
        return loss.detach()


def loss_of_an_object(model: TiedModel, point: Point) -> Case:
    loop = Loop(model, point)
    return Case(loop.step, lambda: _state_of(loop.parts.head))


def loss_that_an_optimizer_knows(model: TiedModel, point: Point) -> Case:
    hidden = {("deep", "inside"): [nn.Parameter(torch.ones(2))]}

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = (model(ids) * hidden["deep", "inside"][0]).sum()
        loss.backward()
        point()
        return loss.detach()

    (weight,) = hidden["deep", "inside"]
    return Case(step, lambda: weight.grad is not None and weight.grad.tolist(), trained=(weight,))


def prompt(model: TiedModel, point: Point) -> Case:
    learned = torch.ones(2, requires_grad=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = (model(ids) * learned).sum()
        loss.backward()
        point()
        return loss.detach()

    return Case(step, lambda: learned.grad is not None and learned.grad.tolist())


def module_in_a_list(model: TiedModel, point: Point) -> Case:
    model.hidden = [nn.Linear(1, 2)]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model.hidden[0](model(ids)[None]).sum()
        loss.backward()
        point()
        return loss.detach()

    return Case(step, lambda: _state_of(model.hidden[0]))


GENERATORS = SimpleNamespace()


def generators(model: TiedModel, point: Point) -> Case:
    mine, numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
    GENERATORS.python = random.Random(3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(2, generator=mine) * GENERATORS.python.random() + numpy.random()
        loss = (model(ids) * noise * random.random() * np.random.rand()).sum()
        point()
        loss.backward()
        return loss.detach()

    return Case(step, lambda: (mine.get_state().tolist(), GENERATORS.python.getstate()))


def hooks(model: TiedModel, point: Point) -> Case:
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)

    def step(ids: torch.Tensor) -> torch.Tensor:
        handles = [
            model.blocks[0].register_forward_hook(lambda module, args, output: output + 1),
            model.embed.weight.register_hook(lambda gradient: gradient * 2),
            nn.modules.module.register_module_forward_pre_hook(
                lambda module, args: (args[0] + 1,) if isinstance(module, nn.LayerNorm) else None
            ),
        ]
        loss = model(ids)
        point()
        loss.backward()
        for handle in handles:
            handle.remove()
        return loss.detach()

    def number() -> Any:
        of_all = nn.modules.module._global_forward_pre_hooks
        return [len(of_all), *(len(m._forward_hooks) for m in model.modules())]

    return Case(step, number)


def batch_of_an_object(model: TiedModel, point: Point) -> Case:
    given: list[Any] = []

    def batch(ids: torch.Tensor) -> Any:
        inside = {"array": np.zeros(1), "set": {1}, "queue": collections.deque([1], maxlen=2)}
        given.append(SimpleNamespace(ids=ids.clone(), inside=inside, generator=random.Random(4)))
        return given[-1]

    def step(batch: Any) -> torch.Tensor:
        batch.ids.add_(1).remainder_(11)
        batch.inside["array"] += 1
        batch.inside["set"].add(len(batch.inside["set"]) + 1)
        batch.inside["queue"].append(len(batch.inside["set"]))
        batch.new = batch.generator.random()
        loss = model(batch.ids) * batch.inside["array"].item() * len(batch.inside["set"])
        loss = loss * batch.new * sum(batch.inside["queue"])
        point()
        loss.backward()
        return loss.detach()

    return Case(step, lambda: [(b.ids.tolist(), repr(b.inside), b.new) for b in given], batch=batch)


CASES = (
    *(grad_mode, other_switches, loss_of_a_closure, loss_of_an_object),
    *(loss_that_an_optimizer_knows, prompt, module_in_a_list, generators, hooks),
    batch_of_an_object,
)


class Failing:
    """Memory runs out at chosen places, counted over all attempts."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.passed = at, 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed in self.at:
            raise torch.OutOfMemoryError("injected")


def run(make: Callable[[TiedModel, Point], Case], at: set[int], *, attached: bool) -> Any:
    model, failing = make_tied_model(), Failing(at)
    random.seed(0)
    np.random.seed(0)
    case = make(model, failing)
    optimizer = torch.optim.SGD([*model.parameters(), *case.trained], 0.1)
    session = None
    if attached:
        session = rematic.attach(model, optimizer, policy="keep", recipe=STEP_ALONE)
    torch.manual_seed(9)
    batches = [case.batch(ids) for ids in make_batches()]
    losses = [case.step(b) if session is None else session.run(case.step, b) for b in batches]
    if session is not None:
        session.detach()
    left = repr((case.state(), random.getstate(), np.random.get_state()))
    return everything(model, losses) | {"left": left}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    nn.modules.module._global_forward_pre_hooks.clear()


@pytest.mark.parametrize("make", CASES)
def test_a_second_attempt_finds_what_the_first_has_found(
    make: Callable[[TiedModel, Point], Case],
) -> None:
    """Cases F3 and L1: in the first step, in later ones, and twice in one."""
    wanted = run(make, set(), attached=False)
    for at in ({1}, {2}, {2, 3}, {1, 4}):
        assert different(run(make, at, attached=True), wanted) == [], at


def test_a_step_that_takes_its_batch_from_a_closure_does_not_lose_it() -> None:
    model = make_tied_model()
    session = rematic.attach(model, policy="keep", recipe=STEP_ALONE)
    batches = iter(make_batches())

    def step(_: object) -> None:
        model(next(batches)).backward()
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(
        rematic.StepOutOfMemoryError, match=r"from an iterator outside of it \('batches'\)"
    ):
        session.run(step, None)
    session.detach()


def test_nothing_of_a_step_that_went_well_waits_for_the_collector() -> None:
    """What was copied for a second attempt counts as memory in use while it lives."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    session = rematic.attach(model, policy="keep")

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            session.run(step, torch.ones(3, 4))
        kinds = (StepTransaction, ModuleSnapshot, ValueState)
        assert [type(found) for found in gc.get_objects() if type(found) in kinds] == []
    finally:
        gc.enable()
        session.detach()

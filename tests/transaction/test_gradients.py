"""No parameter receives a batch twice, whatever failed before."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rematic.transaction import GradientContributions, RestoreError

SIZE = 3


def make(*, accumulated: bool, buffer: str = "none") -> list[nn.Parameter]:
    """Makes parameters whose gradients are of their own, or slices of one buffer."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(SIZE, generator=generator)) for _ in range(3)]
    if accumulated:
        for parameter in parameters:
            parameter.grad = torch.randn(SIZE, generator=generator)
        if buffer != "none":
            flat = torch.cat([p.grad for p in parameters if p.grad is not None])
            for parameter, view in zip(parameters, flat.split(SIZE), strict=True):
                made = {"views": view, "detached": view.detach(), "data": view.data}
                parameter.grad = made[buffer]
    return parameters


class Fails(torch.autograd.Function):
    """Fails in backward when told to."""

    left = 0

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        Fails.left -= 1
        if Fails.left == 0:
            raise torch.OutOfMemoryError("injected")
        return gradient


def step(parameters: list[nn.Parameter], *, backwards: int = 1) -> None:
    """Backward reaches one parameter after the other, `Fails` before each."""
    for _ in range(backwards):
        x = torch.linspace(-1, 1, SIZE)
        for parameter in parameters:
            x = Fails.apply(x * parameter)
        x.sum().backward()


def gradients_of(parameters: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def expected(*, accumulated: bool, backwards: int) -> list[list[float] | None]:
    Fails.left = 0
    parameters = make(accumulated=accumulated)
    step(parameters, backwards=backwards)
    return gradients_of(parameters)


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(
    ("accumulated", "buffer"), [(False, "none"), (True, "none"), (True, "views"), (True, "data")]
)
def test_any_sequence_of_failures_gives_the_gradients_of_none(
    accumulated: bool, backwards: int, buffer: str
) -> None:
    wanted = expected(accumulated=accumulated, backwards=backwards)
    draw = random.Random(0)
    for _ in range(200):
        parameters = make(accumulated=accumulated, buffer=buffer)
        held = [p.grad for p in parameters]
        contributions = GradientContributions(parameters)
        for left in [draw.randint(1, 3 * backwards) for _ in range(draw.randint(1, 4))]:
            Fails.left = left
            with pytest.raises(torch.OutOfMemoryError):
                step(parameters, backwards=backwards)
            contributions.check()
            contributions.undo()
        Fails.left = 0
        step(parameters, backwards=backwards)
        contributions.close()
        assert gradients_of(parameters) == wanted
        if accumulated:  # the same tensors: an optimizer or a bucket may hold them
            assert all(p.grad is g for p, g in zip(parameters, held, strict=True))


def test_hooks_are_gone_when_the_step_is_closed() -> None:
    parameters = make(accumulated=True)
    contributions = GradientContributions(parameters)
    contributions.close()
    contributions.close()
    assert all(not p._post_accumulate_grad_hooks for p in parameters)


@pytest.mark.parametrize("buffer", ["none", "views"])
def test_giving_up_restores_what_was_not_added_to_and_names_the_rest(buffer: str) -> None:
    parameters = make(accumulated=True, buffer=buffer)
    parameters[0].grad = None
    before = gradients_of(parameters)
    contributions = GradientContributions(parameters)
    Fails.left = 2  # after the last parameter has received its part
    with pytest.raises(torch.OutOfMemoryError):
        step(parameters)
    contributions.undo()
    assert [id(p) for p in contributions.restore()] == [id(parameters[2])]
    contributions.close()
    assert gradients_of(parameters)[:2] == before[:2]
    assert parameters[2].grad is not None


def _zero_then_step(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
    step(parameters)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_step_that_clears_the_gradients_first(left: int) -> None:
    wanted = expected(accumulated=False, backwards=1)
    parameters = make(accumulated=True)
    before = gradients_of(parameters)
    contributions = GradientContributions(parameters)
    Fails.left = left
    with pytest.raises(torch.OutOfMemoryError):
        _zero_then_step(parameters)
    contributions.check()
    contributions.undo()
    assert gradients_of(parameters) == before
    _zero_then_step(parameters)
    contributions.close()
    assert gradients_of(parameters) == wanted


def _scale(parameters: list[nn.Parameter]) -> None:
    assert parameters[2].grad is not None
    parameters[2].grad.mul_(0.5)


def _zero_in_place(parameters: list[nn.Parameter]) -> None:
    assert parameters[1].grad is not None
    parameters[1].grad.zero_()


@pytest.mark.parametrize(("buffer", "number"), [("none", 1), ("data", 1), ("views", 3)])
@pytest.mark.parametrize("meddle", [_scale, _zero_in_place])
def test_gradients_that_something_else_changed_are_refused(
    meddle: Callable[[list[nn.Parameter]], None], buffer: str, number: int
) -> None:
    parameters = make(accumulated=True, buffer=buffer)
    contributions = GradientContributions(parameters)
    Fails.left = 2
    with pytest.raises(torch.OutOfMemoryError):
        step(parameters)
    meddle(parameters)
    with pytest.raises(RestoreError, match=rf"^{number} gradients .*changed by something"):
        contributions.check()
    contributions.close()


def test_detached_slices_of_one_buffer_are_refused_with_the_reason() -> None:
    """They have one version, and nothing tells so before it has risen."""
    parameters = make(accumulated=True, buffer="detached")
    contributions = GradientContributions(parameters)
    Fails.left = 2
    with pytest.raises(torch.OutOfMemoryError):
        step(parameters)
    with pytest.raises(RestoreError, match=r"share memory .* Make them views of one buffer"):
        contributions.check()
    contributions.close()


def test_nothing_of_a_buffer_waits_for_the_collector() -> None:
    parameters = make(accumulated=True, buffer="views")
    contributions = GradientContributions(parameters)
    step(parameters)
    contributions.close()
    buffer = weakref.ref(parameters[0].grad)
    gc.disable()
    try:
        for parameter in parameters:
            parameter.grad = None
        assert buffer() is None
    finally:
        gc.enable()


def test_gradients_that_others_have_taken_are_refused() -> None:
    """A hook that moves gradients elsewhere would add those of a second attempt once more."""
    weight, taken = torch.nn.Parameter(torch.ones(2)), []
    weight.register_post_accumulate_grad_hook(lambda p: taken.append(p.grad))
    step = GradientContributions([weight])
    step.check()  # backward has not come to it
    weight.sum().backward()
    with pytest.raises(RestoreError, match="hooks of your own have taken 1 gradients"):
        step.check()
    step.close()


def test_a_batch_in_parts_leaves_what_the_whole_has_added() -> None:
    parameters = make(accumulated=True)
    contributions = GradientContributions(parameters)
    Fails.left = 2
    with pytest.raises(torch.OutOfMemoryError):
        step(parameters)
    assert parameters[2].grad is not None
    added = parameters[2].grad.tolist()
    contributions.check_parts()
    contributions.undo()
    contributions.expect_parts()
    Fails.left = 0
    step(parameters)
    step(parameters)
    contributions.close()
    assert parameters[2].grad.tolist() == added


def test_create_graph_adds_out_of_place() -> None:
    parameters = make(accumulated=True)
    wanted = expected(accumulated=True, backwards=1)
    contributions = GradientContributions(parameters)

    def run() -> None:
        x = torch.linspace(-1, 1, SIZE)
        for parameter in parameters:
            x = Fails.apply(x * parameter)
        x.sum().backward(create_graph=True)

    Fails.left = 2
    with pytest.raises(torch.OutOfMemoryError):
        run()
    contributions.check()
    contributions.undo()
    Fails.left = 0
    step(parameters)
    contributions.close()
    assert gradients_of(parameters) == wanted

"""Autograd functions of the user's, in units and outside, in steps that fail and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import rematic
from tests.activations.peculiar_autograd import Doubles
from tests.step_models import different, everything

WIDTH = 8


class CountsItsBackwards(torch.autograd.Function):
    """Changes what it keeps: a second backward of one forward would be wrong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.count, ctx.scale = 0, scale
        ctx.save_for_backward(x)
        return x.tanh() * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.count += 1
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2) * ctx.scale * ctx.count, None


class KeepsUnseen(torch.autograd.Function):
    """Keeps a tensor as an attribute, and lets go of it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach().clone()
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        cosine: torch.Tensor = ctx.x.cos()
        del ctx.x
        return grad * cosine


class Ranks(torch.autograd.Function):
    """Returns places, which have no gradient, and draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = x.argsort(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return x * 2, places

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        (places,) = ctx.saved_tensors
        return grad * 2 + 0.01 * torch.rand_like(grad) * places


class AddsInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(1.25)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.25


class OfTwo(torch.autograd.Function):
    """Takes one tensor twice; one of its outputs is not used, and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert grad is not None
        assert other is None
        x, y = ctx.saved_tensors
        return grad * y, grad * x


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "changes its context": lambda x: CountsItsBackwards.apply(x, 1.1),
    "keeps a tensor unseen": KeepsUnseen.apply,
    "output without gradient": lambda x: Ranks.apply(x)[0],
    "in place": lambda x: AddsInPlace.apply(x * 1.0),
    "one input twice": lambda x: OfTwo.apply(x, x)[0],
    "reads twice": Doubles.apply,
}


class Block(nn.Module):
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.inner(self.up(x))))


def _outcome(case: str, *, inside: bool, policy: str | None, left: int) -> dict[str, object]:
    function = CASES[case]
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(function if inside else torch.sin) for _ in range(3)])
    failing = [left]

    def fail(gradient: torch.Tensor) -> None:
        failing[0] -= 1
        if failing[0] in (0, 2):  # and once more, in the attempt that follows
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def step(x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(blocks):
            x = block(x)
            if policy is not None:
                x.register_hook(fail)
            if number == 1 and not inside:
                x = function(x)
        loss = x.pow(2).mean()
        loss.backward()
        return loss.detach()

    batches = [
        torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(2)
    ]
    model = nn.Sequential(blocks)
    torch.manual_seed(9)
    if policy is None:
        return everything(model, [step(x) for x in batches])
    recipe = {"policy": {"op_retry": "never"}, "control": {"attempts": 6}}
    session = rematic.attach(model, policy=policy, budget="1GiB", recipe=recipe)
    losses = [session.run(step, x) for x in batches]
    assert failing[0] <= 0
    session.detach()
    return everything(model, losses)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_step_has_the_bits_of_the_plain_one(
    case: str, inside: bool, policy: str
) -> None:
    wanted = _outcome(case, inside=inside, policy=None, left=0)
    for left in (3, 4, 5, 6):
        found = _outcome(case, inside=inside, policy=policy, left=left)
        assert different(found, wanted) == [], left

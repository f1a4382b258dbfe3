"""What autograd offers, and the state around forward that is gone when backward runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.activations.peculiar import (
    WIDTH,
    Block,
    Case,
    Evict,
    Tensors,
    backward,
    chain,
    some_input,
    through,
)
from tests.activations.peculiar_state import Drops

# --- autograd ------------------------------------------------------------------------------------


class Doubles(torch.autograd.Function):
    """Doubles; its gradient is made up, so that it depends on both saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors
        _, out = ctx.saved_tensors  # read twice
        return grad * (out - x + 2)


class CustomFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubles.apply(torch.tanh(self.up(x))))


class ChecksPointsItself(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: F.dropout(torch.tanh(self.up(y)), 0.5), x, use_reentrant=False)
        return x + torch.sigmoid(self.down(inner))


class DifferentiatesInside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        energy = torch.tanh(self.up(y)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + self.down(x).exp() * force


class SwitchesGradientsOff(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.tanh(self.up(x)).abs().mean()
        return super().forward(x) * scale


def _double_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input(requires_grad=True)
    (first,) = torch.autograd.grad(through(blocks, x).sum(), x, create_graph=True)
    yield backward(first.pow(2).sum(), evict)
    assert x.grad is not None
    yield x.grad


def _forward_mode(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what torch 2.13 itself imports
        y = through(blocks, forward_ad.make_dual(x, torch.ones_like(x)))
        value, tangent = forward_ad.unpack_dual(y)
        yield tangent
        yield backward((value + tangent).sum(), evict)


class Normed(Block):
    def setup(self) -> None:
        self.up = weight_norm(nn.Linear(WIDTH, WIDTH))


def _cached_parametrizations(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    with parametrize.cached():
        x = through(blocks, through(blocks, some_input()))
    yield backward(x.sum(), evict)


def _functional_call(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    """Other weights stand in the modules during forward, and are gone in backward."""
    names = [name for name, _ in blocks[0].named_parameters()]
    others = [torch.randn(WIDTH, WIDTH if "weight" in n else 1, requires_grad=True) for n in names]
    weights = {n: o.squeeze(1) * 0.5 for n, o in zip(names, others, strict=True)}  # no leaves
    x = some_input()
    for block in blocks:
        x = torch.func.functional_call(block, weights, (x,))
    yield backward(x.sum(), evict)
    yield from (other.grad for other in others if other.grad is not None)


def _retained(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    for block in blocks:
        x = F.dropout(block(x), 0.3)
    loss = x.sum()
    loss.backward(retain_graph=True)
    yield backward(loss, evict)


def _partial(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    out = through(blocks, some_input())
    evict()
    yield from torch.autograd.grad(out.sum(), list(blocks[2].parameters()), retain_graph=True)
    evict()
    yield from torch.autograd.grad(out.sum(), list(blocks[0].parameters()))


# --- the state around forward, gone when backward runs (findings 9) -------------------------------


class Attends(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(1, 2, -1, 4)
        out = F.scaled_dot_product_attention(heads, heads, heads)
        return x + self.down(out.reshape(x.shape))


def _attention_kernel(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    with sdpa_kernel(SDPBackend.MATH):  # the flash kernel saves other tensors
        loss = through(blocks, some_input()).sum()
    yield backward(loss, evict)


class MakesTensors(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linspace(0, 1, WIDTH).exp().to(x.dtype)


def _default_dtype(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    torch.set_default_dtype(torch.float64)
    try:
        loss = through(blocks, x).sum()
    finally:
        torch.set_default_dtype(torch.float32)
    yield backward(loss, evict)


def _default_device(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    with torch.device("cpu"):
        loss = through(blocks, x).sum()
    yield backward(loss, evict)


def _autocast(cache: bool, *, backward_inside: bool) -> Callable[[nn.ModuleList, Evict], Tensors]:
    def drive(blocks: nn.ModuleList, evict: Evict) -> Tensors:
        x = some_input()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = through(blocks, x).float().sum()
            if backward_inside:
                yield backward(loss, evict)
        if not backward_inside:
            yield backward(loss, evict)

    return drive


class ThreeDimensional(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unsqueeze(0)).squeeze(0)


class Passes(TorchDispatchMode):
    """A mode that changes nothing, as a profiler's or a probe's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _mode_around_forward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    with Passes():
        loss = through(blocks, x).sum()
    yield backward(loss, evict)


def _mode_around_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = through(blocks, some_input()).sum()
    with Passes():
        yield backward(loss, evict)


def _autocast_in_backward_only(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = through(blocks, some_input()).sum()
    with torch.autocast("cpu", torch.bfloat16):
        yield backward(loss, evict)


class SwitchesAutocastOff(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        with torch.autocast("cpu", enabled=False):
            return x.float() + self.down(h.float())


CASES = (
    Case(name="custom function", block=CustomFunction, drive=chain),
    Case(name="checkpoints a part of itself", block=ChecksPointsItself, drive=chain),
    Case(name="autograd.grad inside", block=DifferentiatesInside, drive=chain),
    Case(name="no_grad inside", block=SwitchesGradientsOff, drive=chain),
    Case(name="double backward", block=Block, drive=_double_backward),
    Case(name="functional call", block=Block, drive=_functional_call),
    Case(name="retained graph", block=Drops, drive=_retained),
    Case(name="partial backward", block=Block, drive=_partial),
    Case(name="attention kernel chosen around forward", block=Attends, drive=_attention_kernel),
    Case(name="default dtype around forward", block=MakesTensors, drive=_default_dtype),
    Case(name="default device around forward", block=MakesTensors, drive=_default_device),
    Case(name="mode around forward", block=ThreeDimensional, drive=_mode_around_forward),
    Case(name="mode around backward", block=ThreeDimensional, drive=_mode_around_backward),
    Case(name="autocast", block=Block, drive=_autocast(True, backward_inside=False)),
    Case(name="autocast, no cache", block=Block, drive=_autocast(False, backward_inside=False)),
    Case(name="backward in autocast", block=Block, drive=_autocast(True, backward_inside=True)),
    Case(
        name="autocast off inside",
        block=SwitchesAutocastOff,
        drive=_autocast(True, backward_inside=False),
    ),
    Case(name="autocast around backward only", block=Block, drive=_autocast_in_backward_only),
    Case(name="forward mode", block=Block, drive=_forward_mode, replayed=False),
    Case(
        name="cached parametrizations",
        block=Normed,
        drive=_cached_parametrizations,
        replayed=False,
    ),
)
"""Every step of this kind."""

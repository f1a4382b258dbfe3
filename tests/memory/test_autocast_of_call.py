"""Ops written in Python compute under dispatch modes as they do without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations import Engine
from rematic.activations.collectives import _Watch as WatchOfCollectives
from rematic.activations.harmless_writes import _Watch as WatchOfWrites
from rematic.activations.op_retry import OpRetry
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Plan, Recompute, Selective

_library = torch.library.Library("rematic_tests", "FRAGMENT")
_library.define("product(Tensor x, Tensor weight) -> Tensor")
_library.impl("product", lambda x, weight: F.linear(x, weight), "CPU")


class Product(torch.autograd.Function):
    """A product whose kernel is written in Python, as that of 4-bit weights is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.ops.rematic_tests.product(x, weight).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return torch.ops.rematic_tests.product(grad, weight.t()), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = Product.apply(x.float(), self.frozen.weight)
        return x + self.down(torch.tanh(y + Product.apply(x.float(), self.frozen.weight)))


MODES: dict[str, Callable[[], TorchDispatchMode]] = {
    "retry": lambda: OpRetry(lambda num_bytes, op: 0),
    "probe": lambda: SimulatedProbe(),
    "collectives": lambda: WatchOfCollectives(None),  # type: ignore[arg-type] # it meets none
    "writes": lambda: WatchOfWrites(),
}


@pytest.mark.parametrize("names", [*([name] for name in MODES), [*MODES]], ids="+".join)
@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "none"])
def test_a_kernel_in_python_sees_the_autocast_of_its_caller(
    names: list[str], enabled: bool
) -> None:
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        wanted = torch.ops.rematic_tests.product(x, weight)
        assert (wanted.dtype == torch.bfloat16) == enabled
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(MODES[name]())
            found = torch.ops.rematic_tests.product(x, weight)
            assert torch.is_autocast_enabled("cpu") == enabled
            assert (x @ weight).dtype == wanted.dtype
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("action", [Keep(), Recompute(), Selective()], ids=lambda a: a.name)
@pytest.mark.parametrize("armed", [False, True], ids=["plain", "armed"])
def test_units_with_such_kernels_have_the_bits_of_the_plain_step(action: Any, armed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(), Block()))
    x = torch.randn(4, 8)

    def gradients(mode: contextlib.AbstractContextManager[object]) -> list[torch.Tensor | None]:
        model.zero_grad()
        with mode:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).pow(2).sum()
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted = gradients(contextlib.nullcontext())
    engine = Engine(model)
    engine.apply(Plan(actions=(action, action)))
    for _ in range(2):
        found = gradients(MODES["retry"]() if armed else contextlib.nullcontext())
        for a, b in zip(found, wanted, strict=True):
            assert a is b or (a is not None and b is not None and torch.equal(a, b))
    assert not any(unit.pinned for unit in engine.units)

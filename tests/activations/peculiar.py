"""Modules and steps that are out of the ordinary, each of them legal in plain PyTorch.

A case builds three blocks and drives them through a step; what it returns, the gradients, buffers
and the RNG state must not depend on what rematic does. It calls `evict` where an eviction hurts
most.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rematic

WIDTH = 8
Tensors = Iterable[torch.Tensor]
Evict = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step with something peculiar in it."""

    name: str
    """The id of the parameter."""

    block: Callable[[], nn.Module]
    """Makes one block."""

    drive: Callable[[nn.ModuleList, Evict], Tensors]
    """Runs forward and backward, calls `evict` in between, returns what must be equal."""

    number: int = 3
    """How many blocks there are, all units; two at least."""

    replayed: bool = True
    """Whether a replay must happen when the records start evicted."""

    def __str__(self) -> str:
        return self.name


class Block(nn.Module):
    """The ordinary part of a peculiar block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.setup()

    def setup(self) -> None:
        """Makes what the subclass needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _input(*, requires_grad: bool = False, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, WIDTH, requires_grad=requires_grad)


def _through(blocks: nn.ModuleList, x: Any, *args: Any, **kwargs: Any) -> Any:
    for block in blocks:
        x = block(x, *args, **kwargs)
    return x


def _backward(loss: torch.Tensor, evict: Evict) -> torch.Tensor:
    evict()
    loss.backward()
    return loss


def _chain(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    yield _backward(_through(blocks, _input()).sum(), evict)


# --- inputs and outputs (K1) ---------------------------------------------------------------------


class Keywords(Block):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float, gain: Any = None
    ) -> torch.Tensor:
        x = x if mask is None else x * mask
        return super().forward(x) * scale * gain


def _keywords(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x, gain = _input(), torch.rand(WIDTH, requires_grad=True)
    for i, block in enumerate(blocks):
        x = block(x, None if i % 2 else torch.ones(WIDTH), scale=0.5 + i, gain=gain)
    yield _backward(x.sum(), evict)
    assert gain.grad is not None
    yield gain.grad


class OnlyContainers(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        first, (second,) = state["pair"]
        out = super().forward(first) * torch.sigmoid(second)
        return {"pair": (out, [second + out]), "rest": state["rest"]}


def _only_containers(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    leaf = _input(requires_grad=True)
    state = _through(blocks, {"pair": (leaf, [_input()]), "rest": None})
    yield _backward(state["pair"][0].sum() + state["pair"][1][0].sum(), evict)
    assert leaf.grad is not None
    yield leaf.grad


class Point(NamedTuple):
    hidden: torch.Tensor
    gate: torch.Tensor | None


@dataclass
class Bundle:
    point: Point
    depth: int = 0


@dataclass(frozen=True)
class FrozenBundle:
    point: Point
    depth: int


class Dataclasses(Block):
    def forward(self, bundle: Bundle) -> FrozenBundle:  # type: ignore[override]
        hidden, gate = bundle.point
        out = super().forward(hidden)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return FrozenBundle(Point(out, out.exp()), bundle.depth + 1)


def _dataclasses(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    out = _through(blocks, Bundle(Point(_input(), None)))
    yield torch.tensor(out.depth)
    yield _backward(out.point.hidden.sum(), evict)  # the last gate is not used


class ReadOnly(Block):
    def forward(self, x: torch.Tensor, info: Mapping[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * info["gain"]


def _read_only(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    gain = torch.rand(WIDTH, requires_grad=True)
    info = types.MappingProxyType({"gain": gain})
    yield _backward(_through(blocks, _input(), info).sum(), evict)
    assert gain.grad is not None
    yield gain.grad


class TakesResult(Block):
    def forward(self, x: torch.Tensor, best: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * best.values.exp()


def _takes_result(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input(requires_grad=True)
    out = x
    for block in blocks:
        out = block(out, torch.max(out, dim=1, keepdim=True))
    yield _backward(out.sum(), evict)
    assert x.grad is not None
    yield x.grad


class FillsItsArguments(Block):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, auxiliary: list[torch.Tensor], info: dict[str, Any], bundle: Bundle
    ) -> torch.Tensor:
        out = super().forward(x)
        auxiliary.append(out.pow(2).mean())
        info["calls"] = info.get("calls", 0) + 1
        bundle.depth += 1
        return out


def _fills_its_arguments(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    auxiliary: list[torch.Tensor] = []
    info: dict[str, Any] = {}
    bundle = Bundle(Point(_input(), None))
    out = _through(blocks, _input(), auxiliary, info, bundle)
    yield _backward(out.sum() + torch.stack(auxiliary).sum(), evict)
    yield torch.tensor([len(auxiliary), info["calls"], bundle.depth])


class ReturnsItsInput(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


def _returns_its_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input(requires_grad=True)
    same, out = x, x
    for block in blocks:
        same, out = block(same)
        same = same + out
    yield _backward(same.sum() + out.sum(), evict)


class Embeds(Block):
    def setup(self) -> None:
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.table(ids))


def _embeds(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    ids = torch.randint(0, 5, (4,))
    yield _backward(sum(block(ids).sum() for block in blocks), evict)


class SparseArgument(Block):
    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + torch.sparse.mm(graph, torch.tanh(self.up(x)))


def _sparse_argument(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    graph = torch.eye(4).to_sparse()
    yield _backward(_through(blocks, _input(), graph).sum(), evict)


# --- who owns what -------------------------------------------------------------------------------


def _called_twice(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input()
    for block in [*blocks, *blocks]:
        x = F.dropout(block(x), 0.3)
    yield _backward(x.sum(), evict)


def _leaf_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    frozen = nn.Embedding(5, WIDTH)
    frozen.weight.requires_grad_(False)
    x = frozen(torch.randint(0, 5, (4,)))
    x.requires_grad_()  # as PEFT's enable_input_require_grads does
    yield _backward(_through(blocks, x).sum(), evict)
    assert x.grad is not None
    yield x.grad


class LowRank(Block):
    """Hand-frozen weights with a trainable low-rank part (A1)."""

    def setup(self) -> None:
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


def _low_rank(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    yield from _chain(blocks, evict)
    trainable = [p for p in blocks.parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(blocks)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable)


def _frozen_prefix(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks[0].requires_grad_(False)
    yield from _chain(blocks, evict)


def _frozen_before_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks[1].up.requires_grad_(False)
    loss = _through(blocks, _input()).sum()
    blocks.requires_grad_(False)
    blocks[1].up.requires_grad_(True)
    yield _backward(loss, evict)
    assert [p.requires_grad for p in blocks[1].parameters()] == [True, True, False, False]


class SharesWeights(Block):
    shared = nn.Linear(WIDTH, WIDTH)

    def setup(self) -> None:
        self.up = SharesWeights.shared


def _shares_weights(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    SharesWeights.shared.zero_grad()
    yield from _chain(blocks, evict)


def _unused_branch(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = blocks[0](_input())
    blocks[1](x)  # its output goes nowhere
    yield _backward(blocks[2](x).sum(), evict)


# --- in place ------------------------------------------------------------------------------------


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.relu_()
        h = h.clone()
        h[:, :2].mul_(2)
        h.add_(1)
        return self.down(h).sigmoid_()


def _consumed_in_place(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input()
    for block in blocks:
        x = block(x).add_(1)  # nobody saved the output of the last linear
    yield _backward(x.pow(2).sum(), evict)


class MutatesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x.clone())))
        x.add_(out.detach())
        return out


def _mutates_its_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    total = torch.zeros(())
    x = _input()
    for block in blocks:
        total = total + block(x).sum()
    yield _backward(total, evict)
    yield x


# --- randomness and state (D1 to D3) -------------------------------------------------------------


class Drops(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5, self.training)
        return super().forward(x) + torch.rand_like(x) * x


class OwnGenerator(Block):
    def setup(self) -> None:
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.noise)


def _own_generator(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for _ in range(2):
        yield from _chain(blocks, evict)
    for block in blocks:
        yield block.noise.get_state()


class GivenGenerator(Block):
    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * torch.rand(x.shape, generator=generator)


def _given_generator(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    yield _backward(_through(blocks, _input(), generator=generator).sum(), evict)
    yield generator.get_state()


class Counts(Block):
    """Every way in which modules keep count of what they saw (D3)."""

    def setup(self) -> None:
        self.calls = 0
        self.load: torch.Tensor | None = None
        self.total = torch.zeros(())
        self.seen: list[tuple[int, ...]] = []
        self.by_size: collections.Counter[int] = collections.Counter()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("latest", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        size = x.detach().abs().sum()
        self.load = size if self.load is None else self.load + size
        self.total += size
        self.seen.append(tuple(x.shape))
        self.by_size[len(x)] += 1
        self.average.data.mul_(0.9).add_(x.detach().mean(0))
        self.latest = x.detach().mean(0)
        return super().forward(x) * self.calls + self.load + self.average + len(self.seen)


def _counts(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    for batch in (4, 3):
        yield _backward(_through(blocks, _input(batch=batch)).sum(), evict)
    for block in blocks:
        yield torch.tensor([block.calls, len(block.seen), block.by_size[4], block.by_size[3]])
        yield from (block.load, block.total)


class Grows(Block):
    """Attends over everything it has seen so far (C1)."""

    def setup(self) -> None:
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past.append(self.up(x))
        past = torch.stack(self.past)
        return x + (torch.softmax(past @ x.T, 0).mean((0, 2))[:, None] * self.down(x))


def _grows(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _through(blocks, _input())
    yield _backward(_through(blocks, x).sum(), evict)


class ManyChannels(Block):
    """Running statistics of more bytes than are cloned at every call."""

    def setup(self) -> None:
        self.up = nn.Linear(WIDTH, 20_000)
        self.norm = nn.BatchNorm1d(20_000)
        self.down = nn.Linear(20_000, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def _trains_after_evaluation(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks.eval()
    yield from _chain(blocks, evict)
    blocks.train()
    yield from _chain(blocks, evict)


def _evaluates_before_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = _through(blocks, _input()).sum()
    blocks.eval()  # H3
    yield _backward(loss, evict)


class ReportsReplays(Block):
    outside: ClassVar[collections.Counter[bool]] = collections.Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not rematic.replaying():
            ReportsReplays.outside[self.training] += 1
        return super().forward(x)


def _reports_replays(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    ReportsReplays.outside.clear()
    yield from _chain(blocks, evict)
    yield torch.tensor(ReportsReplays.outside[True])
    assert not rematic.replaying()


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
    x = _input(requires_grad=True)
    (first,) = torch.autograd.grad(_through(blocks, x).sum(), x, create_graph=True)
    yield _backward(first.pow(2).sum(), evict)
    assert x.grad is not None
    yield x.grad


def _functional_call(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    """Other weights stand in the modules during forward, and are gone in backward."""
    names = [name for name, _ in blocks[0].named_parameters()]
    others = [torch.randn(WIDTH, WIDTH if "weight" in n else 1, requires_grad=True) for n in names]
    weights = {n: o.squeeze(1) * 0.5 for n, o in zip(names, others, strict=True)}  # no leaves
    x = _input()
    for block in blocks:
        x = torch.func.functional_call(block, weights, (x,))
    yield _backward(x.sum(), evict)
    yield from (other.grad for other in others if other.grad is not None)


def _retained(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input()
    for block in blocks:
        x = F.dropout(block(x), 0.3)
    loss = x.sum()
    loss.backward(retain_graph=True)
    yield _backward(loss, evict)


def _partial(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    out = _through(blocks, _input())
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
        loss = _through(blocks, _input()).sum()
    yield _backward(loss, evict)


class MakesTensors(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linspace(0, 1, WIDTH).exp().to(x.dtype)


def _default_dtype(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input()
    torch.set_default_dtype(torch.float64)
    try:
        loss = _through(blocks, x).sum()
    finally:
        torch.set_default_dtype(torch.float32)
    yield _backward(loss, evict)


def _default_device(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = _input()
    with torch.device("cpu"):
        loss = _through(blocks, x).sum()
    yield _backward(loss, evict)


def _autocast(cache: bool, *, backward_inside: bool) -> Callable[[nn.ModuleList, Evict], Tensors]:
    def drive(blocks: nn.ModuleList, evict: Evict) -> Tensors:
        x = _input()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = _through(blocks, x).float().sum()
            if backward_inside:
                yield _backward(loss, evict)
        if not backward_inside:
            yield _backward(loss, evict)

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
    x = _input()
    with Passes():
        loss = _through(blocks, x).sum()
    yield _backward(loss, evict)


def _mode_around_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = _through(blocks, _input()).sum()
    with Passes():
        yield _backward(loss, evict)


def _autocast_in_backward_only(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    loss = _through(blocks, _input()).sum()
    with torch.autocast("cpu", torch.bfloat16):
        yield _backward(loss, evict)


class SwitchesAutocastOff(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        with torch.autocast("cpu", enabled=False):
            return x.float() + self.down(h.float())


CASES = (
    Case(name="keywords and None", block=Keywords, drive=_keywords),
    Case(name="tensors in containers only", block=OnlyContainers, drive=_only_containers),
    Case(name="dataclasses and named tuples", block=Dataclasses, drive=_dataclasses),
    Case(name="read-only mapping", block=ReadOnly, drive=_read_only),
    Case(name="result of torch.max", block=TakesResult, drive=_takes_result),
    Case(name="fills its arguments", block=FillsItsArguments, drive=_fills_its_arguments),
    Case(name="returns its input", block=ReturnsItsInput, drive=_returns_its_input),
    Case(name="integer input", block=Embeds, drive=_embeds),
    Case(name="sparse argument", block=SparseArgument, drive=_sparse_argument),
    Case(name="called twice", block=Block, drive=_called_twice),
    Case(name="leaf input that requires grad", block=Block, drive=_leaf_input),
    Case(name="hand-frozen low-rank", block=LowRank, drive=_low_rank),
    Case(name="frozen prefix", block=Block, drive=_frozen_prefix),
    Case(name="frozen before backward", block=Block, drive=_frozen_before_backward),
    Case(name="weights shared by units", block=SharesWeights, drive=_shares_weights),
    Case(name="unused branch", block=Block, drive=_unused_branch),
    Case(name="in place", block=InPlace, drive=_chain),
    Case(name="output consumed in place", block=Block, drive=_consumed_in_place),
    Case(name="mutates its input", block=MutatesItsInput, drive=_mutates_its_input, replayed=False),
    Case(name="dropout", block=Drops, drive=_chain),
    Case(name="generator of its own", block=OwnGenerator, drive=_own_generator),
    Case(name="generator as argument", block=GivenGenerator, drive=_given_generator),
    Case(name="counters", block=Counts, drive=_counts),
    Case(name="list that grows", block=Grows, drive=_grows),
    Case(name="large statistics", block=ManyChannels, drive=_chain, number=2),
    Case(
        name="training after evaluation",
        block=ManyChannels,
        drive=_trains_after_evaluation,
        number=2,
    ),
    Case(name="eval before backward", block=Drops, drive=_evaluates_before_backward),
    Case(name="asks whether it is replayed", block=ReportsReplays, drive=_reports_replays),
    Case(name="custom function", block=CustomFunction, drive=_chain),
    Case(name="checkpoints a part of itself", block=ChecksPointsItself, drive=_chain),
    Case(name="autograd.grad inside", block=DifferentiatesInside, drive=_chain),
    Case(name="no_grad inside", block=SwitchesGradientsOff, drive=_chain),
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
)
"""Every peculiar step."""

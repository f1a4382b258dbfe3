"""Arguments and results of every shape, and who owns the tensors (K1, A1)."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

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

# --- inputs and outputs (K1) ---------------------------------------------------------------------


class Keywords(Block):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float, gain: Any = None
    ) -> torch.Tensor:
        x = x if mask is None else x * mask
        return super().forward(x) * scale * gain


def _keywords(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x, gain = some_input(), torch.rand(WIDTH, requires_grad=True)
    for i, block in enumerate(blocks):
        x = block(x, None if i % 2 else torch.ones(WIDTH), scale=0.5 + i, gain=gain)
    yield backward(x.sum(), evict)
    assert gain.grad is not None
    yield gain.grad


class OnlyContainers(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        first, (second,) = state["pair"]
        out = super().forward(first) * torch.sigmoid(second)
        return {"pair": (out, [second + out]), "rest": state["rest"]}


def _only_containers(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    leaf = some_input(requires_grad=True)
    state = through(blocks, {"pair": (leaf, [some_input()]), "rest": None})
    yield backward(state["pair"][0].sum() + state["pair"][1][0].sum(), evict)
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
    out = through(blocks, Bundle(Point(some_input(), None)))
    yield torch.tensor(out.depth)
    yield backward(out.point.hidden.sum(), evict)  # the last gate is not used


class ReadOnly(Block):
    def forward(self, x: torch.Tensor, info: Mapping[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * info["gain"]


def _read_only(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    gain = torch.rand(WIDTH, requires_grad=True)
    info = types.MappingProxyType({"gain": gain})
    yield backward(through(blocks, some_input(), info).sum(), evict)
    assert gain.grad is not None
    yield gain.grad


class TakesResult(Block):
    def forward(self, x: torch.Tensor, best: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * best.values.exp()


def _takes_result(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input(requires_grad=True)
    out = x
    for block in blocks:
        out = block(out, torch.max(out, dim=1, keepdim=True))
    yield backward(out.sum(), evict)
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
    bundle = Bundle(Point(some_input(), None))
    out = through(blocks, some_input(), auxiliary, info, bundle)
    yield backward(out.sum() + torch.stack(auxiliary).sum(), evict)
    yield torch.tensor([len(auxiliary), info["calls"], bundle.depth])


class ReturnsItsInput(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


def _returns_its_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input(requires_grad=True)
    same, out = x, x
    for block in blocks:
        same, out = block(same)
        same = same + out
    yield backward(same.sum() + out.sum(), evict)


class Embeds(Block):
    def setup(self) -> None:
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.table(ids))


def _embeds(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    ids = torch.randint(0, 5, (4,))
    yield backward(sum(block(ids).sum() for block in blocks), evict)


class SparseArgument(Block):
    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + torch.sparse.mm(graph, torch.tanh(self.up(x)))


def _sparse_argument(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    graph = torch.eye(4).to_sparse()
    yield backward(through(blocks, some_input(), graph).sum(), evict)


# --- who owns what -------------------------------------------------------------------------------


def _called_twice(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = some_input()
    for block in [*blocks, *blocks]:
        x = F.dropout(block(x), 0.3)
    yield backward(x.sum(), evict)


def _leaf_input(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    frozen = nn.Embedding(5, WIDTH)
    frozen.weight.requires_grad_(False)
    x = frozen(torch.randint(0, 5, (4,)))
    x.requires_grad_()  # as PEFT's enable_input_require_grads does
    yield backward(through(blocks, x).sum(), evict)
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
    yield from chain(blocks, evict)
    trainable = [p for p in blocks.parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(blocks)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable)


def _frozen_prefix(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks[0].requires_grad_(False)
    yield from chain(blocks, evict)


def _frozen_before_backward(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    blocks[1].up.requires_grad_(False)
    loss = through(blocks, some_input()).sum()
    blocks.requires_grad_(False)
    blocks[1].up.requires_grad_(True)
    yield backward(loss, evict)
    assert [p.requires_grad for p in blocks[1].parameters()] == [True, True, False, False]


class SharesWeights(Block):
    shared = nn.Linear(WIDTH, WIDTH)

    def setup(self) -> None:
        self.up = SharesWeights.shared


def _shares_weights(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    SharesWeights.shared.zero_grad()
    yield from chain(blocks, evict)


def _unused_branch(blocks: nn.ModuleList, evict: Evict) -> Tensors:
    x = blocks[0](some_input())
    blocks[1](x)  # its output goes nowhere
    yield backward(blocks[2](x).sum(), evict)


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
)
"""Every step of this kind."""

"""Token-wise parts of units in slices: values, memory, what is refused, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rematic.activations import Engine, PartsMode, token_wise_parts
from rematic.memory import SimulatedProbe
from rematic.policy import Plan, RecomputeOffload
from tests.activations.families import build_llama
from tests.activations.parity import Outcome, differences, read_outcome
from tests.activations.peculiar_autograd import Doubles

WIDTH = 8
LENGTH = 64


class Norm(nn.Module):
    """As those of language models: no single op of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class MLP(nn.Module):
    """Token-wise unless there is dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH)
        self.down = nn.Linear(16 * WIDTH, WIDTH)
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).pow(2)
        return self.down(F.dropout(hidden, self.rate) if self.rate else hidden)


class Block(nn.Module):
    """Looks at earlier positions, as a whole; its norm and its MLP do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x).cumsum(1) / LENGTH)
        return x + self.mlp(x)


class CheckpointsItself(Block):
    """Its MLP runs in a checkpoint of its own, which would run it whole in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x).cumsum(1) / LENGTH
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class ReadsTwice(MLP):
    """An autograd function inside it reads what it saved twice, which no checkpoint stands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubles.apply(x.tanh()))


class WithReadsTwice(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = ReadsTwice()


def make(block: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


def x() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def step(model: nn.Module) -> Outcome:
    torch.manual_seed(9)
    loss = model(x()).pow(2).mean()
    loss.backward()
    return read_outcome(model, [loss.detach()])


def attach(model: nn.Module, how: PartsMode) -> Engine:
    engine = Engine(model)
    engine.apply(Plan(actions=(RecomputeOffload(),) * len(engine.units)))
    engine.slice_parts(how)
    return engine


def told(engine: Engine) -> list[str]:
    return sorted({name for parts in engine._parts.values() for name in parts._told})


def close(found: Outcome, wanted: Outcome) -> None:
    for a, b in zip(found.losses, wanted.losses, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
    assert torch.equal(found.generator, wanted.generator)


@pytest.mark.parametrize(
    ("block", "sliced"),
    [
        (Block, ["mlp", "norm"]),
        (MLP, [""]),
        (CheckpointsItself, ["norm"]),
        (WithReadsTwice, ["norm"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_parts_in_slices_differ_by_the_order_of_sums_alone(
    block: Callable[[], nn.Module], sliced: list[str]
) -> None:
    wanted = step(make(block))
    model = make(block)
    engine = attach(model, "sliced")
    for _ in range(2):
        model.zero_grad()
        close(step(model), wanted)
    assert told(engine) == sliced
    assert all("forward" not in part.__dict__ for u in engine.units for part in u.module.children())
    engine.detach()


@pytest.mark.parametrize("block", [Block, MLP, CheckpointsItself, WithReadsTwice])
def test_parts_that_are_only_asked_change_no_bit(block: Callable[[], nn.Module]) -> None:
    wanted = step(make(block))
    model = make(block)
    engine = attach(model, "asked")
    assert differences(step(model), wanted) == []
    assert not any(parts.were_asked for parts in engine._parts.values())  # not checked yet
    model.zero_grad()
    assert differences(step(model), wanted) == []
    assert told(engine) == []
    assert all(parts.are_known for parts in engine._parts.values())
    assert engine.may_have_token_wise_parts()
    engine.detach()


def test_a_part_without_anything_inside_is_not_worth_slices() -> None:
    class Thin(nn.Module):
        """One product, written as a class of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thin = Thin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.thin(x).cumsum(1)

    model = make(Mixes)
    engine = attach(model, "asked")
    assert engine.may_have_token_wise_parts()
    for _ in range(2):
        step(model)
    assert not engine.may_have_token_wise_parts()
    engine.detach()


@pytest.mark.parametrize("block", [Block, WithReadsTwice])
def test_a_part_whose_worth_is_not_known_for_lack_of_memory_is_asked_again(
    block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> bool:
        raise torch.OutOfMemoryError("injected")

    wanted = step(make(block))
    model = make(block)
    engine = attach(model, "sliced")
    with monkeypatch.context() as patch:
        patch.setattr(token_wise_parts, "is_worth_tiles", fails)
        assert differences(step(model), wanted) == []
    assert told(engine) == []
    assert engine.may_have_token_wise_parts(), "the last attempts are worth a try"
    model.zero_grad()
    close(step(model), wanted)
    assert told(engine) == (["mlp", "norm"] if block is Block else ["norm"])
    engine.detach()


def test_dropout_that_is_turned_on_afterwards_draws_what_the_plain_step_draws() -> None:
    def run(model: nn.Sequential) -> Outcome:
        for block in model:
            block.mlp.rate = 0.0
        step(model)
        for block in model:
            block.mlp.rate = 0.5
        return step(model)

    wanted = run(make())
    model = make()
    engine = attach(model, "sliced")
    close(run(model), wanted)
    assert told(engine) == ["mlp", "norm"]
    engine.detach()


@pytest.mark.parametrize("evicts", [False, True])
def test_graphs_that_are_kept_are_computed_again_each_time(evicts: bool) -> None:
    def run(model: nn.Module, evict: Callable[[], object]) -> Outcome:
        batch = x().requires_grad_()
        loss = model(batch).pow(2).mean()
        loss.backward(retain_graph=True)
        evict()
        (first,) = torch.autograd.grad(loss, batch, create_graph=True)
        evict()
        first.pow(2).sum().backward()
        return read_outcome(model, [loss.detach(), first.detach()])

    wanted = run(make(), lambda: None)
    model = make()
    engine = attach(model, "sliced")
    close(run(model, (lambda: engine.ledger.evict(1 << 40)) if evicts else lambda: None), wanted)
    engine.detach()


def _peak_and_left(how: PartsMode) -> tuple[int, int]:
    model = make()
    engine = attach(model, how)
    step(model)
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with SimulatedProbe() as probe:
            for _ in range(3):
                step(model)
                model.zero_grad()
            left = probe.allocated_bytes()
    finally:
        gc.enable()
    engine.detach()
    peak = probe.snapshot().peak_allocated_bytes
    assert peak is not None
    return peak, left


def test_slices_need_less_and_leave_nothing_to_the_collector() -> None:
    whole, asked, sliced = (_peak_and_left(how) for how in ("whole", "asked", "sliced"))
    hidden = 2 * LENGTH * 16 * WIDTH * 4  # bytes of `up`
    assert asked == whole
    # of the result of `up`, that of tanh and their gradients, an eighth is left
    assert whole[0] - sliced[0] > 2 * hidden
    assert (whole[1], sliced[1]) == (0, 0)


def test_the_blocks_of_a_language_model() -> None:
    def run(model: Any) -> Outcome:
        ids = torch.arange(46).view(2, 23) % 11
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return read_outcome(model, [loss.detach()])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return build_llama("sdpa")

    wanted = run(build())
    model = build()
    engine = attach(model, "sliced")
    close(run(model), wanted)
    assert told(engine) == ["input_layernorm", "mlp", "post_attention_layernorm"]
    engine.detach()


def test_the_experts_of_a_mixture_run_whole_since_their_decisions_are_kept() -> None:
    from tests.activations.test_routing import mixtral

    def run(model: Any) -> Outcome:
        torch.manual_seed(9)
        ids = torch.arange(14).view(2, 7) % 11
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return read_outcome(model, [loss.detach()])

    wanted = run(mixtral())
    model = mixtral()
    engine = attach(model, "sliced")
    close(run(model), wanted)
    assert told(engine) == ["input_layernorm", "post_attention_layernorm"]
    engine.detach()

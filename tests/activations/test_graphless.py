"""Units whose graph keeps what it does not save: found by bytes, recomputed without a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations import Engine
from rematic.memory import SimulatedProbe
from rematic.policy import Action, Keep, Plan, Recompute, RecomputeOffload, Selective
from tests.activations.hidden import HIDDEN, WIDTH, StashingBlock, ids, make
from tests.activations.parity import Outcome, differences, read_outcome
from tests.events import Events

HIDDEN_BYTES = 2 * 32 * (WIDTH + HIDDEN) * 4  # what both products of a block put aside
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "called twice": {"twice": True},
    "tied and called twice": {"tied": True, "twice": True},
}


def run(model: nn.Module, num_batches: int = 3, *, autocast: bool = False) -> Outcome:
    torch.manual_seed(9)
    losses = []
    for seed in range(num_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids(seed))
        loss.backward()
        losses.append(loss.detach())
    return read_outcome(model, losses)


def applied(model: nn.Module, action: Action) -> Engine:
    engine = Engine(model)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    return engine


@pytest.mark.parametrize("action", [Recompute(), RecomputeOffload(), Selective(), Keep()], ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_step_has_the_bits_of_the_plain_one(options: dict[str, bool], action: Action) -> None:
    wanted = run(make(**options))
    model = make(**options)
    engine = applied(model, action)
    assert differences(run(model), wanted) == []
    assert [unit.graphless for unit in engine.units] == [True] * 3
    calls = 4 if options.get("twice") else 3
    assert engine.ledger.counts.replays.total() == (0 if action == Keep() else 3 * calls)
    engine.detach()


def test_autocast_is_the_same_in_both_passes() -> None:
    wanted = run(make(), autocast=True)
    model = make()
    engine = applied(model, Recompute())
    assert differences(run(model, autocast=True), wanted) == []
    engine.detach()


def test_the_bytes_are_really_gone() -> None:
    def held_and_peak(action: Action | None) -> tuple[int, int]:
        model = make()
        if action is not None:
            applied(model, action)
        run(model, 1)
        model.zero_grad()
        with SimulatedProbe() as probe:
            loss = model(ids())
            held = probe.allocated_bytes()
            loss.backward()
            model.zero_grad()
            del loss
            gc.collect()
            assert probe.allocated_bytes() == 0
        return held, probe.peak_allocated_bytes

    plain, _ = held_and_peak(None)
    kept, kept_peak = held_and_peak(Keep())
    recomputed, recomputed_peak = held_and_peak(Recompute())
    inputs = 3 * 2 * 32 * WIDTH * 4
    around = plain - kept  # of embedding, head and loss the same is held
    assert kept - recomputed >= 3 * HIDDEN_BYTES
    assert abs(around) <= inputs
    assert recomputed < inputs + 2 * 32 * WIDTH * 4 + 3 * 2 * 32 * 17 * 4 + 3 * 5_200
    assert kept_peak - recomputed_peak > HIDDEN_BYTES


def test_the_journal_names_declared_and_measured_bytes() -> None:
    model, journal = make(), Events()
    session = rematic.attach(model, policy="recompute", journal=journal)
    run(model, 1)
    told = [event for event in journal.of("notice") if event["kind"] == "hidden_stash"]
    assert [event["unit"] for event in told] == ["blocks.0", "blocks.1", "blocks.2"]
    assert told[0]["figures"]["hidden"] == HIDDEN_BYTES
    session.detach()


def test_memory_falls_when_backward_has_passed_a_unit() -> None:
    """The inputs of a unit go with its node, though the loss is still alive."""
    model = make()
    applied(model, Recompute())
    run(model, 1)
    with SimulatedProbe() as probe:
        loss = model(ids())
        before = probe.allocated_bytes()
        loss.backward()
        model.zero_grad()
        left = probe.allocated_bytes()
    assert left < before - 2 * 2 * 32 * WIDTH * 4


def test_twice_through_the_graph_and_partial_gradients() -> None:
    def grads(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = model(ids())
        parts = torch.autograd.grad(loss, [model.blocks[1].down], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [*parts, *(p.grad.clone() for p in model.parameters())]

    wanted = grads(make())
    model = make()
    applied(model, Recompute())
    run(model, 1)
    model.zero_grad()
    for block in model.blocks:
        block.mean.zero_()
    assert all(map(torch.equal, grads(model), wanted))
    loss = model(ids())
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    model = make()
    applied(model, Recompute())
    run(model, 1)
    (gradient,) = torch.autograd.grad(model(ids()), [model.blocks[0].up], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_hooks_on_parameters_fire_once_for_a_step() -> None:
    def count(model: nn.Module) -> list[int]:
        calls = [0, 0]

        def on_gradient(gradient: torch.Tensor) -> None:
            calls[0] += 1

        def after(parameter: torch.Tensor) -> None:
            calls[1] += 1

        run(model, 1)
        model.blocks[1].up.register_hook(on_gradient)
        model.blocks[1].up.register_post_accumulate_grad_hook(after)
        run(model, 1)
        return calls

    model = make()
    applied(model, Recompute())
    assert count(model) == count(make()) == [1, 1]


class Collecting(StashingBlock):
    """Lets others have a tensor from inside."""

    collected: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(x @ self.up.t())
        if Collecting.collected is not None and not rematic.replaying():
            Collecting.collected.append(inside)
        return super().forward(x)


def test_a_graph_that_others_share_is_not_thrown_away() -> None:
    """Gradients through a tensor that was collected inside must reach what lies before."""

    def grads(model: nn.Module) -> Outcome:
        torch.manual_seed(3)
        Collecting.collected = []
        loss = model(ids()) + sum(t.square().mean() for t in Collecting.collected)
        Collecting.collected = None
        loss.backward()
        return read_outcome(model, [loss])

    def build() -> nn.Module:
        model = make()
        for i in range(3):
            block = Collecting()
            block.load_state_dict(model.blocks[i].state_dict())
            model.blocks[i] = block
        return model

    plain = build()
    run(plain, 1)
    plain.zero_grad()
    wanted = grads(plain)
    model = build()
    engine = applied(model, Recompute())
    run(model, 1)
    assert all(unit.graphless for unit in engine.units)
    for is_first in (True, False):
        model.zero_grad()
        torch.nn.init.zeros_(model.blocks[0].mean)
        found = grads(model)
        assert torch.equal(found.losses[0], wanted.losses[0])
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient)
            if not is_first:
                assert torch.equal(found.gradients[name], gradient)
        assert not any(unit.graphless for unit in engine.units)


class Reaching(StashingBlock):
    """Uses a parameter that is not its own."""

    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.__dict__["elsewhere"]()


def test_gradients_to_tensors_from_elsewhere_are_not_lost() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        outer = nn.Module()
        outer.scale = nn.Parameter(torch.ones(WIDTH))
        outer.blocks = nn.ModuleList([Reaching() for _ in range(2)])
        for block in outer.blocks:
            block.__dict__["elsewhere"] = lambda: outer.scale
        return outer

    def step(model: nn.Module) -> Outcome:
        torch.manual_seed(2)
        x = torch.randn(2, 32, WIDTH)
        for block in model.blocks:
            x = block(x)
        loss = x.square().mean()
        loss.backward()
        return read_outcome(model, [loss])

    plain, model = build(), build()
    engine = applied(model, Recompute())
    for _ in range(2):
        assert differences(step(model), step(plain)) == []
    assert [unit.graphless for unit in engine.units] == [False, False]


class Failing(StashingBlock):
    """Runs out of memory in a replay when it is told to."""

    fails = False  # of the class: a replay puts attributes of the module back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if Failing.fails and rematic.replaying():
            Failing.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes")
        return output


class HoldsWeight(StashingBlock):
    """Has a trainable tensor that is a plain attribute, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["scale"] = torch.ones(WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_gradients_to_tensors_that_are_no_parameters_are_not_lost() -> None:
    def gradients(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(HoldsWeight(), HoldsWeight()))
        if attached:
            applied(model, Recompute())
        for _ in range(2):
            model(torch.ones(2, 32, WIDTH)).square().mean().backward()
        return [block.scale.grad for block in model[0]]

    assert all(map(torch.equal, gradients(attached=True), gradients(attached=False)))


@pytest.mark.parametrize("has_others", [True, False])
def test_memory_that_runs_out_in_the_replay_is_made_by_evicting(has_others: bool) -> None:
    wanted = run(make(), 2)
    model = make()
    failing = Failing()
    failing.load_state_dict(model.blocks[1].state_dict())
    model.blocks[1] = failing
    engine = applied(model, Recompute())
    run(model, 1)
    model.zero_grad()
    for block in model.blocks:
        block.mean.zero_()
    engine.apply(Plan(actions=(Keep() if has_others else Recompute(), Recompute(), Recompute())))

    def fail(gradient: torch.Tensor) -> None:
        Failing.fails = True

    model.blocks[2].down.register_hook(fail)
    if not has_others:
        with pytest.raises(torch.OutOfMemoryError):
            run(model, 1)
        return
    found = run(model, 2)
    assert engine.ledger.counts.num_evictions > 0
    assert differences(found, wanted) == []


@pytest.fixture
def int8() -> Callable[[], nn.Module]:
    bnb = pytest.importorskip("bitsandbytes", reason="an optional package")

    class Int8Block(nn.Module):
        """An MLP of frozen LLM.int8 weights with a low-rank adapter."""

        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {"bias": False, "has_fp16_weights": False}
            self.up = bnb.nn.Linear8bitLt(256, 1024, **options)
            self.down = bnb.nn.Linear8bitLt(1024, 256, **options)
            self.a = nn.Linear(256, 8, bias=False)
            self.b = nn.Linear(8, 1024, bias=False)
            for layer in (self.up, self.down):
                layer.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x) + self.b(self.a(x))))

    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Int8Block() for _ in range(3)])
        return nn.Sequential(blocks.to(torch.bfloat16).to("cpu"))

    return build


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    Collecting.collected = None


def test_case_j3_int8_layers_with_an_adapter(int8: Callable[[], nn.Module]) -> None:
    def step(model: nn.Module) -> tuple[Outcome, int]:
        torch.manual_seed(1)
        x = torch.randn(1, 512, 256, dtype=torch.bfloat16)
        with SimulatedProbe() as probe:
            loss = model(x).float().pow(2).sum()
            held = probe.allocated_bytes()
            loss.backward()
        return read_outcome(model, [loss]), held

    plain, model = int8(), int8()
    engine = applied(model, Recompute())
    for _ in range(2):
        (wanted, held_by_plain), (found, held) = step(plain), step(model)
        assert differences(found, wanted) == []
        plain.zero_grad()
        model.zero_grad()
    assert [unit.graphless for unit in engine.units] == [True] * 3
    assert held < held_by_plain / 3

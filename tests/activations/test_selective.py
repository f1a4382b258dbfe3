"""Selective records: chosen results are kept, the rest is computed again, the bits stay."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations import Engine, replaying
from rematic.memory import SimulatedProbe
from rematic.policy import Plan, Selective
from tests.activations.families import ENCODER, FAMILIES, LLAMA_SDPA, Family
from tests.activations.parity import Outcome, differences, make, run_steps

SELECTIONS = {
    "default": Selective(),
    "attention": Selective(save=("attention",)),
    "cheap": Selective(save=("softmax", "norm", "gelu", "silu", "mul", "add")),
    "occurrence": Selective(save=("matmul[1]", "aten.addmm[0]", "add[1]")),
    "random": Selective(save=("dropout", "attention", "matmul")),
}


@functools.cache
def plain_outcome(family: Family, *, autocast: bool = False) -> Outcome:
    return run_steps(make(family), family, autocast=autocast)


def selective(model: nn.Module, action: Selective) -> Engine:
    engine = Engine(model)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    return engine


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("action", SELECTIONS.values(), ids=SELECTIONS.keys())
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_selective_steps_have_the_bits_of_the_plain_ones(
    family: Family, action: Selective, autocast: bool
) -> None:
    model = make(family)
    engine = selective(model, action)
    found = run_steps(model, family, autocast=autocast)
    assert differences(found, plain_outcome(family, autocast=autocast)) == []
    assert all(engine.ledger.counts.replays[name] == 2 for name in family.units)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_selective_record_can_be_evicted_whole(family: Family) -> None:
    model = make(family)
    engine = selective(model, Selective())
    seen: list[int] = []

    def evict() -> None:
        held = engine.ledger.resident_bytes()
        is_first_of_mlp = family.name == "mlp" and not seen
        assert held > 0 or is_first_of_mlp  # its kept results are changed in place
        seen.append(held)
        assert engine.ledger.evict(held + 1).bytes_freed == held
        assert engine.ledger.resident_bytes() == 0

    found = run_steps(model, family, before_backward=evict)
    assert differences(found, plain_outcome(family)) == []


def test_what_is_kept_is_exactly_the_result_of_the_ops() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = nn.Sequential(nn.Sequential(Block(), Block()))
    engine = selective(model, Selective(save=("matmul",)))
    x = torch.randn(5, 8)
    model(x).sum().backward()  # the first call learns where a replay ends
    loss = model(x).sum()
    # `up` is needed by gelu's backward; a replay ends before `down`, so its result is not kept
    assert [record.own_bytes() for record in engine.ledger.records()] == [5 * 32 * 4] * 2
    loss.backward()


def test_random_ops_are_never_kept() -> None:
    model = make(ENCODER)
    engine = selective(model, SELECTIONS["random"])
    run_steps(model, ENCODER)
    engine.apply(Plan(actions=tuple(Selective(save=("dropout",)) for _ in engine.units)))
    run_steps(model, ENCODER, before_backward=lambda: _assert_nothing_held(engine))


def _assert_nothing_held(engine: Engine) -> None:
    assert engine.ledger.resident_bytes() == 0


class InPlaceBlock(nn.Module):
    """Changes the result of its first product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu_().sin()).tanh()


def test_a_kept_result_that_is_changed_in_place_is_copied_from_the_next_call_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(InPlaceBlock(), InPlaceBlock()))
    x = torch.randn(3, 8)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    engine = selective(model, Selective(save=("matmul",)))
    for unit in engine.units:
        unit.trusted = True  # no replay but those of backward
    kept = []
    counter = CountInReplay("aten::addmm")
    with caplog.at_level(logging.WARNING, logger="rematic"), counter:
        for _ in range(2):
            model.zero_grad()
            loss = model(x).sum()
            kept.append([record.own_bytes() for record in engine.ledger.records()])
            loss.backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert kept == [[0, 0], [3 * (16 + 8) * 4] * 2]
    assert dict(engine.ledger.counts.replays) == {"0.0": 2, "0.1": 2}
    assert counter.num_calls == 4, "two products of two units, in the first step alone"
    warnings = [r.message for r in caplog.records if "changed in place" in r.message]
    assert len(warnings) == 2  # once for each unit, not for each step
    assert warnings[0].startswith("unit '0.0': the result of aten.addmm.default, which selective")


class Recurrent(nn.Module):
    """A recurrence whose kernels change parts of a matrix product that count changes apart."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = cell(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(2):
            state = self.cell(x, state)
            x = x + self.down(state[0] if isinstance(state, tuple) else state)
        return x


class ThroughData(nn.Module):
    """Changes a matrix product through `.data`, which raises no version."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.data.mul_(0.5)
        return self.down(h.sin()).tanh()


class AddsToProjection(nn.Module):
    """Adds in place to a projection of three dimensions, as adapters do to that of their layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x[None])
        h += 0.5
        return self.down(h.sin())[0].tanh()


UNCOUNTED: dict[str, Callable[[], nn.Module]] = {
    "GRUCell": lambda: Recurrent(nn.GRUCell),
    "LSTMCell": lambda: Recurrent(nn.LSTMCell),
    ".data": ThroughData,
    "+= after a linear without bias": AddsToProjection,
}


@pytest.mark.parametrize("block", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_a_kept_result_that_is_changed_without_a_version_is_not_used(
    block: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(block(), block()))
    x = torch.randn(3, 8)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    engine = selective(model, Selective(save=("matmul",)))
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not any(unit.pinned for unit in engine.units)


class CountInReplay(TorchDispatchMode):
    """Counts how often an op runs in replays."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.num_calls = 0
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += replaying() and func._schema.name == self._name
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_exact_in_every_call_whatever_the_calls_before_needed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
            self.ends_with_tanh = False

        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            h = self.down(torch.nn.functional.gelu(self.up(x)))
            if scale is not None:
                h = h * scale.sin()  # backward of it needs the second product
            return torch.tanh(h) if self.ends_with_tanh else h

    model = Block()
    engine = Engine(nn.ModuleList([model]), patterns=["0"])
    engine.apply(Plan(actions=(Selective(save=("matmul",)),)))
    x, scale = torch.randn(5, 8), torch.randn(8, requires_grad=True)
    first, both = 5 * 32 * 4, 5 * (32 + 8) * 4
    for with_scale, with_tanh, wanted in [
        *((False, False, first), (True, False, both), (False, False, first)),
        *((False, True, first), (False, True, both), (False, False, first)),
    ]:
        model.ends_with_tanh = with_tanh  # seen only by running it: what it needs is kept later
        loss = model(x, scale if with_scale else None).sum()
        assert [record.own_bytes() for record in engine.ledger.records()] == [wanted]
        loss.backward()


def test_ops_that_a_plan_names_and_that_never_occur_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody wrote them, so nobody can mend them: a model that was traced without its dropout."""
    model = make(ENCODER)
    engine = Engine(model)
    actions = tuple(
        Selective(save=("aten::mm[99]", f"aten::mul[{90 + i}]")) for i in range(len(engine.units))
    )
    engine.apply(Plan(actions=actions), agreed=[False] * len(actions))
    with caplog.at_level(logging.INFO, logger="rematic"):
        run_steps(model, ENCODER)
    told = [r for r in caplog.records if "occur" in r.message]
    assert [r.levelname for r in told] == ["INFO"]
    assert told[0].message.startswith("2 of the ops that a plan keeps do not occur in unit '")
    engine.detach()


def test_an_op_that_never_occurs_is_reported_with_those_that_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(ENCODER)
    selective(model, Selective(save=("convolution", "matmul")))
    with caplog.at_level(logging.WARNING, logger="rematic"):
        run_steps(model, ENCODER)
    reported = [r.message for r in caplog.records if "never occurs" in r.message]
    assert len(reported) == len(ENCODER.units)
    assert "the op 'convolution' that selective should keep never occurs" in reported[0]
    assert "aten::native_layer_norm" in reported[0]


@pytest.mark.parametrize("op_of_replay", [1, 9, 20])
def test_memory_that_runs_out_in_a_selective_replay_is_answered_in_full(op_of_replay: int) -> None:
    model = make(LLAMA_SDPA)
    for unit in selective(model, Selective()).units:
        unit.trusted = True  # no replay but those of backward
    failing = FailInReplay(op_of_replay)
    with failing:
        found = run_steps(model, LLAMA_SDPA)
    assert differences(found, plain_outcome(LLAMA_SDPA)) == []
    assert failing.num_failures == 2 * len(LLAMA_SDPA.units)


class FailInReplay(TorchDispatchMode):
    """Lets one op of every first try of a replay run out of memory."""

    def __init__(self, op_of_replay: int) -> None:
        super().__init__()
        self.op_of_replay = op_of_replay
        self.num_failures = 0
        self._num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._num_ops = self._num_ops + 1 if replaying() else 0
        if self._num_ops == self.op_of_replay:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"{func}: out of memory")
        return func(*args, **(kwargs or {}))


def test_no_cycle_keeps_results_alive() -> None:
    model = make(LLAMA_SDPA)
    engine = selective(model, Selective())
    gc.collect()
    gc.disable()
    try:
        with SimulatedProbe() as probe:
            probe.track(model.parameters())
            before = None
            for _ in range(4):
                run_steps(model, LLAMA_SDPA, num_batches=1)
                model.zero_grad()
                held = probe.allocated_bytes()
                assert before is None or held <= before
                before = held
    finally:
        gc.enable()
    assert engine.ledger.records() == []

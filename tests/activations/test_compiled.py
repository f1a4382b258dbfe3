"""Compiled units: the record stays outside, policies never recompile (case I2 as well)."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.utils import counters

import rematic
from rematic.activations import Engine, OpRetry
from rematic.policy import (
    Action,
    Keep,
    Offload,
    Plan,
    Policy,
    Recompute,
    RecomputeOffload,
    Selective,
)
from rematic.recipes import RecipeError
from tests.activations.blocks import Model, make_input, make_model
from tests.activations.parity import Outcome, differences, read_outcome

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Drops(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def _by_method(model: Model, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def _by_wrapper(model: Model, **options: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)


WAYS = {"method": _by_method, "wrapper": _by_wrapper}
ACTIONS: list[Action] = [Keep(), Recompute(), Selective(), Offload(), RecomputeOffload()]
Compile = Callable[..., None]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def step(model: nn.Module) -> Outcome:
    torch.manual_seed(1)
    loss = model(make_input(requires_grad=True))
    loss.backward()
    outcome = read_outcome(model, [loss])
    outcome.gradients = {
        name.replace("_orig_mod.", ""): gradient for name, gradient in outcome.gradients.items()
    }
    model.zero_grad()
    return outcome


def plain(backend: str = "aot_eager") -> Outcome:
    model = make_model(Drops)
    _by_method(model, backend=backend)
    wanted = step(model)
    torch._dynamo.reset()
    counters.clear()
    return wanted


def applied(engine: Engine, action: Action) -> None:
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS.keys())
def test_no_policy_recompiles_and_every_one_has_the_same_bits(
    compiled: Compile, after: bool
) -> None:
    wanted = plain()
    model = make_model(Drops)
    if not after:
        compiled(model, backend="aot_eager", fullgraph=True)
    engine = Engine(model)
    if after:
        compiled(model, backend="aot_eager", fullgraph=True)
    for action in (*ACTIONS, *ACTIONS):
        applied(engine, action)
        assert differences(step(model), wanted) == []
    assert [unit.num_forwards for unit in engine.units] == [len(ACTIONS) * 2] * 3
    replays = engine.ledger.counts.replays
    assert [replays[f"blocks.{i}"] for i in range(3)] == [6] * 3
    assert [unit.pinned for unit in engine.units] == [None] * 3
    assert counters["stats"]["unique_graphs"] == 1  # one for all blocks, first pass and replay
    assert not counters["graph_break"]
    engine.detach()
    assert all("forward" not in vars(m) for m in model.modules() if isinstance(m, Drops))
    step(model)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS.keys())
def test_records_can_be_evicted_and_ops_run_again(compiled: Compile) -> None:
    wanted = plain()
    model = make_model(Drops)
    compiled(model, backend="aot_eager")
    engine = Engine(model)
    applied(engine, Keep())
    step(model)
    torch.manual_seed(1)
    with OpRetry(lambda *_: 0):
        loss = model(make_input(requires_grad=True))
        held = engine.ledger.resident_bytes()
        assert engine.ledger.evict(held).bytes_freed == held > 0
        loss.backward()
    found = read_outcome(model, [loss])
    found.gradients = {n.replace("_orig_mod.", ""): g for n, g in found.gradients.items()}
    assert differences(found, wanted) == []
    assert engine.ledger.counts.replays.total() == 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_the_compiler_that_people_use() -> None:
    wanted = plain("inductor")
    model = make_model(Drops)
    _by_method(model, backend="inductor")
    engine = Engine(model)
    for action in (Keep(), Recompute()):
        applied(engine, action)
        with OpRetry(lambda *_: 0):
            assert differences(step(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 3
    assert counters["stats"]["unique_graphs"] == 1


class PartlyCompiled(nn.Module):
    """Calls compiled code inside of itself, which must never run uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inside = torch.compile(self.compiled, backend=_counting, fullgraph=True)

    def compiled(self, y: torch.Tensor) -> torch.Tensor:
        assert torch.compiler.is_compiling(), "it would hold every score"
        return torch.tanh(y) * y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(x)))


def _counting(graph: Any, inputs: Any) -> Any:
    return graph.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_is_compiled_inside_of_a_unit_stays_compiled() -> None:
    wanted = step(make_model(PartlyCompiled))
    model = make_model(PartlyCompiled)
    engine = Engine(model)
    for action in ACTIONS:
        applied(engine, action)
        with OpRetry(lambda *_: 0):
            assert differences(step(model), wanted) == []
    assert [unit.pinned for unit in engine.units] == [None] * 3
    assert all(verdict.hidden is not None for verdict in engine.ledger.verdicts.values())
    engine.detach()


def test_names_and_copies_are_those_of_the_compiled_model() -> None:
    model, untouched = make_model(Drops), make_model(Drops)
    for other in (model, untouched):
        _by_method(other, backend="aot_eager")
    engine = Engine(model)
    assert list(model.state_dict()) == list(untouched.state_dict())
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in copied.blocks)  # as in plain torch
    copied(make_input()).backward()
    assert [unit.num_forwards for unit in engine.units] == [0] * 3
    calls = [block._compiled_call_impl for block in model.blocks]
    engine.detach()
    assert all(a is not b._compiled_call_impl for a, b in zip(calls, model.blocks, strict=True))
    assert all(block._compiled_call_impl is not None for block in model.blocks)


def test_hooks_of_a_compiled_unit_see_each_forward_once() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    wanted = plain()
    model = make_model(Drops)
    for block in model.blocks:
        block.register_forward_hook(count)
    _by_method(model, backend="aot_eager")
    engine = Engine(model)
    applied(engine, Recompute())
    for _ in range(2):
        assert differences(step(model), wanted) == []
    assert calls == 6
    assert engine.ledger.counts.replays.total() == 6
    engine.detach()


def test_evaluation_of_compiled_units_is_left_alone() -> None:
    model = make_model(Drops)
    _by_method(model, backend="aot_eager", fullgraph=True)
    engine = Engine(model)
    model.eval()
    with torch.no_grad():
        model(make_input())
    assert [unit.num_forwards for unit in engine.units] == [0] * 3
    engine.detach()


def _whole_by_method(model: Model) -> nn.Module:
    model.compile(backend="eager")
    return model


def _whole_by_wrapper(model: Model) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, backend="eager")
    return wrapped


def _part(model: Model) -> nn.Module:
    model.blocks.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("compiled", "what"),
    [
        (_whole_by_method, "the model"),
        (_whole_by_wrapper, "the model"),
        (_part, "blocks"),
        (lambda m: nn.Sequential(torch.compile(m, backend="eager")), "0"),
    ],
)
def test_what_is_compiled_around_units_is_refused(
    compiled: Callable[[Model], nn.Module], what: str
) -> None:
    message = rf"^{what} is compiled as a whole: .*for block in model.model.layers: block.compile"
    model = compiled(make_model())
    with pytest.raises(ValueError, match=message):
        rematic.attach(model, policy="recompute")
    assert all("forward" not in vars(m) for m in model.modules() if type(m).__name__ == "Block")


def test_a_model_compiled_whole_afterwards_is_cut_at_its_units(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(Drops)
    wanted = step(model)
    engine = Engine(model)
    applied(engine, Recompute())
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.manual_seed(1)
        loss = compiled(make_input(requires_grad=True))
        loss.backward()
        assert differences(read_outcome(model, [loss]), wanted) == []
        model.zero_grad()
    assert [unit.num_forwards for unit in engine.units] == [2] * 3
    assert caplog.text.count("a compiled region around it ends here") == 3
    engine.detach()


def test_case_i2_the_budget_of_the_compiler_needs_compiled_units() -> None:
    # by its own means: taking a value back by `delattr`, as monkeypatch does, hides the setting
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        with pytest.raises(
            ValueError, match=r"activation_memory_budget is 0.5, but nothing is compiled"
        ):
            rematic.attach(make_model(), policy="keep")
        model = make_model()
        _by_method(model, backend="aot_eager")
        rematic.attach(model, policy="keep").detach()
    with pytest.raises(RecipeError, match="activation_memory_budget"):
        rematic.attach(make_model(), recipe={"policy": {"activation_memory_budget": 0.5}})


def test_modules_that_are_exchanged_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(Drops)
    session = rematic.attach(model, policy="recompute")
    old, new = model.blocks[1], make_model(Drops).blocks[1]
    with session.step(make_input()):
        model(make_input()).backward()
    model.zero_grad()
    model.blocks[1] = new
    wanted = step(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, "rematic"), session.step(make_input()):
        found = step(model)
    assert differences(found, wanted) == []
    assert "unit 'blocks.1': another module stands in its place" in caplog.text
    assert "forward" not in vars(old)
    assert session._engine.units[1].module is new
    assert session._engine.units[1].num_forwards == 2
    session.switch(Policy(name="kept", default=Keep()))
    session.detach()
    assert "forward" not in vars(new)

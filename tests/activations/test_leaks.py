"""F19: with the garbage collector off, nothing of a step outlives it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations import Engine
from rematic.activations.record import Record
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Plan, Recompute
from tests.activations.blocks import Block, make_input, make_model
from tests.activations.families import FAMILIES, Family
from tests.activations.parity import attached, batches, make


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch:
    """Knows every record and every saved tensor that was made, weakly."""

    def __init__(self, engine: Engine) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        engine.ledger.after_forward = self._note

    def _note(self, record: Record) -> None:
        self.records.append(weakref.ref(record))
        for holder in record.live_holders():
            if holder.tensor is not None and not holder.external:
                self.storages.append(weakref.ref(holder.tensor.untyped_storage()))

    def num_alive(self) -> tuple[int, int]:
        records = sum(ref() is not None for ref in self.records)
        return records, sum(ref() is not None for ref in self.storages)


def _backward(model: nn.Module, family: Family, engine: Engine) -> None:
    family.loss(model, batches(family, 1)[0]).backward()


def _evicted(model: nn.Module, family: Family, engine: Engine) -> None:
    loss = family.loss(model, batches(family, 1)[0])
    engine.ledger.evict(1 << 40)
    loss.backward()


def _forward_only(model: nn.Module, family: Family, engine: Engine) -> None:
    family.loss(model, batches(family, 1)[0])


def _fails_in_forward(model: nn.Module, family: Family, engine: Engine) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    hook = engine.units[1].module.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        family.loss(model, batches(family, 1)[0])
    hook.remove()


def _fails_in_backward(model: nn.Module, family: Family, engine: Engine) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    handles = []
    pre = engine.units[1].module.register_forward_hook(
        lambda m, i, o: handles.append((o[0] if isinstance(o, tuple) else o).register_hook(fail))
    )
    loss = family.loss(model, batches(family, 1)[0])
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward()
    pre.remove()


STEPS = {
    "step": _backward,
    "step with evictions": _evicted,
    "aborted after forward": _forward_only,
    "exception in forward": _fails_in_forward,
    "exception in backward": _fails_in_backward,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_records_and_activations_die_with_their_step(
    family: Family, step: Callable[[nn.Module, Family, Engine], None]
) -> None:
    model = make(family)
    with attached(model, kept=[True, True, False]) as engine:
        for _ in range(2):  # the first call of a unit is special
            watch = Watch(engine)
            step(model, family, engine)
            model.zero_grad()
            assert watch.records
            assert watch.storages
            assert watch.num_alive() == (0, 0)


class KeepsItsOutputs(Block):
    """Appends its outputs to a list that it replaces now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.outputs.append(out)
        return out


def test_a_list_of_outputs_makes_no_cycle() -> None:
    model = make_model(KeepsItsOutputs)
    with attached(model) as engine:
        for _ in range(2):
            watch = Watch(engine)
            model(make_input()).backward()
            for block in model.blocks:
                block.outputs = []
            assert watch.num_alive() == (0, 0)


class MutatesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x.clone())
        x.add_(out)
        return out


def test_a_unit_that_mutates_its_input_makes_no_cycle() -> None:
    """With the tensors themselves as arguments its aborted steps leaked for good."""
    model = make_model(MutatesItsInput)
    with attached(model) as engine:
        for _ in range(2):
            watch = Watch(engine)
            model(make_input().clone())
            assert watch.num_alive() == (0, 0)


def test_a_detached_model_dies_without_the_collector() -> None:
    model = make_model()
    engine = Engine(model)
    model(make_input()).backward()
    engine.detach()
    alive = [weakref.ref(model), *(weakref.ref(block) for block in model.blocks)]
    del model, engine
    assert [ref() for ref in alive] == [None] * 4


def test_an_attached_model_dies_without_the_collector() -> None:
    model = make_model()
    engine = Engine(model)
    model(make_input()).backward()
    alive = [weakref.ref(model), *(weakref.ref(block) for block in model.blocks)]
    del model, engine
    assert [ref() for ref in alive] == [None] * 4


def _aborts(model: nn.Module, session: rematic.Session, engine: Engine) -> None:
    with contextlib.suppress(KeyError), session.step():
        model(make_input(64))
        raise KeyError("user")


def _runs_out(model: nn.Module, session: rematic.Session, engine: Engine) -> None:
    with contextlib.suppress(torch.OutOfMemoryError), session.step(), SimulatedProbe(1):
        model(make_input(64))


def _finishes(model: nn.Module, session: rematic.Session, engine: Engine) -> None:
    session.run(lambda x: model(x).backward(), make_input(64))


def _switches(model: nn.Module, session: rematic.Session, engine: Engine) -> None:
    session.switch("keep" if session.policy.name == "recompute" else "recompute")
    with session.step():
        loss = model(make_input(64))
        session.evict(1 << 20)
        loss.backward()


def test_bytes_are_flat_over_many_steps_of_every_kind() -> None:
    """Thirty rounds of finished, aborted, failed and switched steps."""
    model = make_model()
    probe = SimulatedProbe()
    session = rematic.attach(model, policy="keep", probe=probe)
    engine = session._engine
    after_round = []
    with probe:
        for _ in range(30):
            for kind in (_finishes, _aborts, _switches, _runs_out):
                kind(model, session, engine)
            model.zero_grad()
            after_round.append(probe.allocated_bytes())
    session.detach()
    assert after_round == [0] * 30
    assert engine.ledger.records() == []
    assert len(engine.ledger._records) <= 64, "dead references are purged"


def test_plans_hold_no_records() -> None:
    model = make_model()
    with attached(model) as engine:
        watch = Watch(engine)
        loss = model(make_input())
        for action in (Recompute(), Keep()):
            engine.apply(Plan(actions=(action,) * 3))
        del loss
        assert watch.num_alive() == (0, 0)

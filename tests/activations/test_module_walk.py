"""The way through a unit's modules, remembered from call to call: never stale."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations.module_state import ModuleState
from rematic.activations.module_walk import ModuleWalk

NOTHING: frozenset[str] = frozenset()


class Level(int, Enum):
    LOW = 0


class Tally:
    def __init__(self) -> None:
        self.calls = 0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0
        self.mode = "a"
        self.config = object()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.same = self.inner
        self.linear = nn.Linear(2, 2)


def _read(unit: nn.Module, walk: ModuleWalk | None) -> Any:
    state = ModuleState(unit, NOTHING, walk)
    return (
        state.attributes,
        [dict(then) for _, then in state.children],
        [(kept.name, kept.contents) for kept in state.containers],
        [(tensor.full_name, tensor.version) for tensor in state.tensor_states],
        [(computed.name, computed.version) for computed in state.computed],
        [held.full_name for held in state.objects],
        state.generators,
    )


def _set(name: str, value: object) -> Callable[[Outer], None]:
    return lambda unit: setattr(unit.inner, name, value)


def _exchange(unit: Outer) -> None:
    del unit.inner.mode
    unit.inner.other = "b"


CHANGES: dict[str, Callable[[Outer], None]] = {
    "nothing": lambda unit: None,
    "a value": _set("mode", "b"),
    "equal and another": _set("rate", -0.0),
    "another type": _set("rate", 0),
    "an enumeration": _set("rate", Level.LOW),
    "a new attribute": _set("more", 1),
    "one gone": lambda unit: delattr(unit.inner, "mode"),
    "one for another": _exchange,
    "a container": _set("config", [1]),
    "a tensor": _set("config", torch.ones(2)),
    "a computed tensor": _set("config", torch.ones(2, requires_grad=True) * 2),
    "a generator": _set("config", torch.Generator()),
    "an object": _set("config", Tally()),
    "evaluation": lambda unit: setattr(unit.inner, "training", False),
    "another module": lambda unit: setattr(unit, "inner", Inner()),
    "one module more": lambda unit: unit.inner.add_module("deep", nn.Linear(1, 1)),
    "one module less": lambda unit: delattr(unit, "linear"),
    "a buffer": lambda unit: unit.inner.register_buffer("count", torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_was_remembered_is_given_up_when_it_changes(change: Callable[[Outer], None]) -> None:
    unit, walk = Outer(), ModuleWalk()
    for _ in range(2):
        assert repr(_read(unit, walk)) == repr(_read(unit, None))
    change(unit)
    for _ in range(2):
        assert repr(_read(unit, walk)) == repr(_read(unit, None))


def test_objects_are_read_again_when_they_change_and_only_then() -> None:
    unit, walk = Outer(), ModuleWalk()
    unit.inner.config = unit.config = tally = Tally()
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(tally, "calls", 1),
        lambda: tally.seen.append(1),
        lambda: tally.total.add_(1),
        lambda: setattr(tally.inside, "calls", 5),
        lambda: setattr(tally, "more", None),
        lambda: delattr(tally, "more"),
    ]
    tally.seen, tally.total, tally.inside = [], torch.zeros(1), Tally()
    before = ModuleState(unit, NOTHING, walk).objects
    for change in changes:
        change()
        now = ModuleState(unit, NOTHING, walk).objects
        assert [held.full_name for held in now] == ["config"], "one object in two places"
        assert (now[0]._contents is before[0]._contents) == (change is changes[0])
        before = now


def test_an_unchanged_module_is_not_read_again() -> None:
    unit, walk = Outer(), ModuleWalk()
    first, second = (ModuleState(unit, NOTHING, walk).attributes for _ in range(2))
    assert [part for part, _ in first] == [unit, unit.inner, unit.linear]
    assert all(a is b for (_, a), (_, b) in zip(first, second, strict=True))


def test_the_unit_itself_is_not_kept_alive() -> None:
    walk = ModuleWalk()
    held = [part.module for part, _ in walk.through(Outer(), anew=False)]
    assert held[0] is None
    assert isinstance(held[1], Inner)

"""Modules after a failed attempt are as before it."""

from __future__ import annotations

import array
import collections
import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rematic.transaction import ChangingState, ModuleSnapshot, RestoreError

LARGE = (1 << 16) // 4 + 1


class Thing:
    def __init__(self) -> None:
        self.count, self.items = 0, [1]


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self) -> None:
        self.count = 0


class Listed(list[int]):
    count = 0


class Peculiar(nn.Module):
    """State of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("none", None)
        self.weight = nn.Parameter(torch.ones(2))
        self.norm, self.slot = nn.BatchNorm1d(2), nn.Identity()
        self.number, self.text, self.flag = 1, "a", None
        self.items, self.counter = [1, [2]], collections.Counter(a=1)
        self.table = {"x": {"y": 1}}
        self.tensor = torch.zeros(2)
        self.thing = Thing()
        self.generator = torch.Generator().manual_seed(4)
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)
        self.legacy = np.random.RandomState(3)
        self.array, self.wide = np.ones(3), np.zeros(LARGE)
        self.numbers = iter([1, 2, 3, 4])
        self.inside = [torch.zeros(2), {"t": torch.zeros(2)}, Thing(), np.ones(2)]
        self.pair = ([], random.Random(5))
        self.drawn = {"g": torch.Generator().manual_seed(6)}
        self.deep = Thing()
        self.deep.inner = Thing()
        self.deep.inner.inner = Thing()
        self.deep.inner.state = None
        self.slotted, self.listed = Slotted(), Listed([1])
        self.bytes, self.typed = bytearray(b"a"), array.array("d", [1])


def _state(module: Peculiar) -> dict[str, object]:
    return {
        "buffers": {name: b.tolist() for name, b in module.named_buffers()},
        "names": sorted(vars(module)),
        "plain": (module.number, module.text, module.flag, module.training, module.norm.training),
        "items": repr((module.items, module.counter, module.table)),
        "tensor": module.tensor.tolist(),
        "thing": (module.thing.count, list(module.thing.items)),
        "generator": module.generator.get_state().tolist(),
        "others": (module.python.getstate(), repr(module.numpy.bit_generator.state)),
        "legacy": repr(module.legacy.get_state()),
        "arrays": (module.array.tolist(), module.wide.sum()),
        "iterator": list(copy.copy(module.numbers)),
        "inside": repr(module.inside[:2]) + str(module.inside[3]),
        "thing inside": (module.inside[2].count, module.inside[2].items),
        "pair": (list(module.pair[0]), module.pair[1].getstate()),
        "drawn": module.drawn["g"].get_state().tolist(),
        "deep": (module.deep.inner.inner.count, module.deep.inner.state),
        "slotted": (module.slotted.count, hasattr(module.slotted, "later")),
        "listed": (list(module.listed), module.listed.count),
        "bytes": (bytes(module.bytes), list(module.typed)),
        "parameters": [id(p) for p in module.parameters()],
        "tensors": [name for name, _ in (*module.named_parameters(), *module.named_buffers())],
        "modules": [name for name, _ in module.named_modules()],
        "children": [id(m) for m in module.children()],
    }


def _new_attribute(m: Peculiar) -> None:
    m.added = torch.ones(1)


def _replaced(m: Peculiar) -> None:
    m.small, m.tensor, m.weight = torch.ones(3), torch.ones(2), nn.Parameter(torch.zeros(2))
    m.items, m.table = [], {}


def _in_place(m: Peculiar) -> None:
    m.small.add_(1)
    m.tensor.add_(1)
    m.items.append(m.items[1].append(5))
    m.table["x"]["y"] = 7
    m.counter.update("ab")


def _numbers(m: Peculiar) -> None:
    m.number, m.text, m.flag = 2, "b", 3
    m.eval()


def _statistics(m: Peculiar) -> None:
    m.norm(torch.randn(5, 2))


def _object(m: Peculiar) -> None:
    m.thing.count += 1
    m.thing.items.append(2)


def _draw(m: Peculiar) -> None:
    torch.rand(2, generator=m.generator)


def _draw_outside_torch(m: Peculiar) -> None:
    m.python.random()
    m.numpy.random()
    m.legacy.rand()


def _arrays(m: Peculiar) -> None:
    m.array += 1
    m.wide += 1


def _next(m: Peculiar) -> None:
    next(m.numbers)


def _inside_containers(m: Peculiar) -> None:
    m.inside[0].add_(1)
    m.inside[1]["t"].add_(1)
    m.inside[2].count += 1
    m.inside[2].items.append(2)
    m.inside[3][0] = 5
    m.pair[0].append(1)
    m.pair[1].random()
    torch.rand(1, generator=m.drawn["g"])


def _inside_objects(m: Peculiar) -> None:
    m.deep.inner.inner.count += 1
    m.deep.inner.state = 3
    m.slotted.count, m.slotted.later = 1, 2
    m.listed.append(2)
    m.listed.count = 1
    m.bytes.append(1)
    m.typed.append(2)


def _first_of_its_kind(m: Peculiar) -> None:
    m.norm.child = nn.Linear(1, 1)
    m.slot.weight, m.slot.child = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    m.slot.register_buffer("made", torch.ones(1))


def _resized(m: Peculiar) -> None:
    m.small.resize_(5).fill_(1)
    m.inside[0].resize_(4).fill_(1)


def _child(m: Peculiar) -> None:
    m.norm = nn.Identity()


@pytest.mark.parametrize(
    "change",
    [
        *(_new_attribute, _replaced, _in_place, _numbers, _statistics, _object, _draw),
        *(_draw_outside_torch, _arrays, _next, _child),
        *(_inside_containers, _inside_objects, _resized, _first_of_its_kind),
    ],
)
def test_whatever_an_attempt_changes_is_put_back(change: Callable[[Peculiar], None]) -> None:
    module = Peculiar()
    snapshot = ModuleSnapshot(module.modules(), ChangingState())
    before = _state(module)
    held = module.items
    for _ in range(2):  # as often as attempts fail
        change(module)
        snapshot.check()
        snapshot.restore()
        assert _state(module) == before
        assert module.items is held


def test_a_large_buffer_is_copied_once_a_step_has_shown_that_it_changes() -> None:
    module, changing = Peculiar(), ChangingState()
    first = ModuleSnapshot(module.modules(), changing)
    module.large.add_(1)
    with pytest.raises(RestoreError, match="buffer 'large', of which no copy was taken"):
        first.check()
    second = ModuleSnapshot(module.modules(), changing)
    module.large.add_(1)
    second.check()
    second.restore()
    assert module.large.eq(1).all()


def test_objects_are_copied_in_the_first_step_and_where_they_change() -> None:
    module, changing = Peculiar(), ChangingState()
    first = ModuleSnapshot(module.modules(), changing)
    module.thing.count += 1
    first.learn()
    second = ModuleSnapshot(module.modules(), changing)
    module.thing.count += 1
    second.restore()
    assert module.thing.count == 1


def test_an_object_that_a_later_step_is_the_first_to_change_is_put_back() -> None:
    module, changing = Peculiar(), ChangingState()
    ModuleSnapshot(module.modules(), changing).learn()
    second = ModuleSnapshot(module.modules(), changing)
    _inside_objects(module)
    module.thing.count += 1
    second.restore()
    assert (module.thing.count, module.deep.inner.inner.count, module.slotted.count) == (0, 0, 0)


def test_a_large_container_is_copied_once_a_step_has_shown_that_it_changes() -> None:
    module, changing = Peculiar(), ChangingState()
    module.items = list(range(20_000))
    ModuleSnapshot(module.modules(), changing).learn()
    second = ModuleSnapshot(module.modules(), changing)
    module.items.append(1)
    with pytest.raises(RestoreError, match="'0 items', of which no copy was taken since no step"):
        second.check()
    third = ModuleSnapshot(module.modules(), changing)
    module.items.append(1)
    third.check()
    third.restore()
    assert len(module.items) == 20_001


def test_what_has_not_changed_is_not_copied_again() -> None:
    module, changing = Peculiar(), ChangingState()
    first = ModuleSnapshot(module.modules(), changing)
    second = ModuleSnapshot(module.modules(), changing)
    tensor = id(module.inside[0])
    assert second.values.tensors[tensor] is first.values.tensors[tensor]
    module.inside[0].add_(1)
    third = ModuleSnapshot(module.modules(), changing)
    assert third.values.tensors[tensor] is not first.values.tensors[tensor]


def test_a_large_array_is_copied_where_steps_change_it() -> None:
    for changes in (True, False):
        module, changing = Peculiar(), ChangingState()
        first = ModuleSnapshot(module.modules(), changing)
        module.wide += changes
        first.learn()
        second = ModuleSnapshot(module.modules(), changing)
        before = module.wide.copy()
        module.wide += 1
        second.restore()
        assert (module.wide == before).all() == changes, "that it changes now was not to be known"


@pytest.mark.parametrize(
    "iterator",
    [
        lambda: (i for i in range(3)),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: zip([1, 2], [3, 4], strict=True),
        lambda: map(abs, [1, 2, 3]),
    ],
    ids=["generator", "cycle", "zip", "map"],
)
def test_an_iterator_that_cannot_be_copied_is_refused(iterator: Callable[[], Any]) -> None:
    module = Peculiar()
    module.numbers = iterator()
    with pytest.raises(RestoreError, match="attribute 'numbers' of a module is an iterator that"):
        ModuleSnapshot(module.modules(), ChangingState()).check()


def test_attributes_of_a_host_are_left_alone() -> None:
    module = Peculiar()
    snapshot = ModuleSnapshot([module], ChangingState(), skipped=frozenset({"text", "new"}))
    module.text, module.number = "b", 2
    module.new = 1
    snapshot.restore()
    assert (module.text, module.number, module.new) == ("b", 1, 1)


def test_a_forward_that_a_host_has_exchanged_is_left_as_it_is() -> None:
    """Lightning puts `training_step` in its place around a call of the wrapper."""
    module = Peculiar()
    module.forward = lambda: "exchanged"
    snapshot = ModuleSnapshot([module], ChangingState())
    del module.forward
    snapshot.restore()
    assert "forward" not in vars(module)


def test_a_snapshot_dies_with_its_last_user() -> None:
    """Not when garbage is collected: what it copied counts as memory in use until then."""
    gc.disable()
    try:
        snapshot = ModuleSnapshot([nn.Linear(2, 2)], ChangingState())
        gone = weakref.ref(snapshot.values)
        del snapshot
        assert gone() is None
    finally:
        gc.enable()

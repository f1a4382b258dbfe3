"""State that a later call is the first to change: replays see what each call saw."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import Engine, ReplayError, outside_state
from rematic.activations.kept_values import CLONED_BUFFER_BYTES
from rematic.activations.object_state import ObjectWatch
from rematic.policy import Keep, Plan, Recompute
from tests.activations.parity import Outcome, differences, read_outcome

FIRST_CHANGE = 3
"""The number of the call, of each block, that is the first to change its state."""


class Inner:
    scale = 1.0
    tensor: torch.Tensor
    large: torch.Tensor


class State:
    def __init__(self) -> None:
        self.scale = 1.0
        self.history: list[float] = [1.0]
        self.by_name: dict[str, Any] = {"scale": 1.0, "deep": [1.0]}
        self.tensor = torch.ones(())
        self.large = torch.ones(CLONED_BUFFER_BYTES)
        self.inner, self.space = Inner(), SimpleNamespace(scale=1.0)
        self.inner.tensor, self.inner.large = torch.ones(()), torch.ones(CLONED_BUFFER_BYTES)
        self.tensors = [torch.ones(()), torch.ones(CLONED_BUFFER_BYTES)]
        self.last: torch.Tensor | None = None
        self.maybe: float | None = None


def _new_object(block: Late) -> None:
    other = State()
    other.scale = block.state.scale + 0.5
    block.state = other


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda b: setattr(b.state, "scale", b.state.scale + 0.5),
    "what was None": lambda b: setattr(b.state, "maybe", (b.state.maybe or 0.0) + 0.5),
    "a new attribute": lambda b: setattr(b.state, "extra", getattr(b.state, "extra", 0.0) + 0.5),
    "a list": lambda b: b.state.history.append(0.5),
    "a dictionary": lambda b: b.state.by_name.update(scale=b.state.by_name["scale"] + 0.5),
    "a list in a dictionary": lambda b: b.state.by_name["deep"].append(0.5),
    "a tensor in place": lambda b: b.state.tensor.add_(0.5),
    "another tensor": lambda b: setattr(b.state, "tensor", b.state.tensor + 0.5),
    "a tensor of an object inside": lambda b: b.state.inner.tensor.add_(0.5),
    "a tensor in a list": lambda b: b.state.tensors[0].add_(0.5),
    "an object inside": lambda b: setattr(b.state.inner, "scale", b.state.inner.scale + 0.5),
    "a namespace inside": lambda b: setattr(b.state.space, "scale", b.state.space.scale + 0.5),
    "another object": _new_object,
    "a computed tensor": lambda b: setattr(b.state, "last", b.up.weight.mean()),
    "an attribute of its own": lambda b: setattr(b, "own", b.own + 0.5),
    "a list of its own": lambda b: b.own_list.append(0.5),
    "a buffer": lambda b: b.count.add_(0.5),
}


class Late(nn.Module):
    """Computes with everything it holds, then changes a part of it, from the third call on."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.state = State()
        self.own, self.own_list = 1.0, [1.0]
        self.register_buffer("count", torch.zeros(()))
        self.change = change
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.state
        self.calls[0] += 1
        if self.calls[0] >= FIRST_CHANGE:
            self.change(self)
        factors = [
            *(self.own, sum(self.own_list), 1 + self.count, state.scale, sum(state.history)),
            *(
                state.by_name["scale"],
                sum(state.by_name["deep"]),
                state.tensor.item(),
                state.large[0].item(),
            ),
            *(state.inner.scale, state.space.scale, state.inner.tensor.item()),
            *(state.inner.large[0].item(), state.tensors[0].item(), state.tensors[1][0].item()),
            *(1 + (state.maybe or 0.0), 1 + getattr(state, "extra", 0.0)),
        ]
        for factor in factors:
            x = x * factor
        if state.last is not None:
            x = x * state.last.detach()
        return x + self.down(torch.tanh(self.up(x)))


def test_what_is_changed_between_forward_and_backward_is_seen_as_forward_saw_it() -> None:
    nothing = lambda _: None  # noqa: E731
    wanted = steps(build(nothing))
    model = build(nothing)
    engine = Engine(model)
    engine.apply(Plan(actions=(Keep(), Keep())))
    states = [block.state for block in model[0]]

    def change() -> None:
        engine.ledger.evict(1 << 40)
        for state in states:
            state.scale, state.inner.scale = 3.0, 5.0
            state.history.append(7.0)

    torch.manual_seed(1)
    for outcome in wanted:
        losses = [model(torch.randn(4, 6)).square().sum() for _ in range(2)]
        change()
        for loss in reversed(losses):
            loss.backward()
        assert [(s.scale, s.inner.scale, s.history) for s in states] == [(3.0, 5.0, [1.0, 7.0])] * 2
        for state in states:
            state.scale, state.inner.scale = 1.0, 1.0
            state.history.pop()
        assert differences(read_outcome(model, losses), outcome) == []


def build(change: Callable[[Any], object]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Late(change), Late(change)))


def steps(
    model: nn.Module, evict: Callable[[], object] = lambda: None, *, number: int = 3
) -> list[Outcome]:
    """Two micro-batches in flight at once: at first one that changes nothing, and one that does."""
    torch.manual_seed(1)
    found = []
    for _ in range(number):
        losses = [model(torch.randn(4, 6)).square().sum() for _ in range(2)]
        evict()
        for loss in reversed(losses):
            loss.backward()
        found.append(read_outcome(model, losses))
    return found


@pytest.mark.parametrize("start", ["kept and evicted", "recomputed"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_later_call_is_the_first_to_change(
    change: Callable[[Any], object], start: str
) -> None:
    plain = build(change)
    wanted = steps(plain)
    model = build(change)
    engine = Engine(model)
    action = Recompute() if start == "recomputed" else Keep()
    engine.apply(Plan(actions=(action, action)))
    found = steps(model, lambda: engine.ledger.evict(1 << 40))
    assert [differences(*pair) for pair in zip(found, wanted, strict=True)] == [[]] * 3
    assert engine.ledger.counts.replays.total() == 12, "nothing is kept for it"
    for block, other in zip(model[0], plain[0], strict=True):
        assert _values(block) == _values(other)


def _values(block: Any) -> Any:
    state = vars(block.state)
    plain = {k: str(v) for k, v in state.items() if not isinstance(v, (torch.Tensor, Inner))}
    plain["inner"] = block.state.inner.scale, block.state.inner.tensor.item()
    tensors = {k: v.sum().item() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return plain, tensors, block.own, block.own_list, block.calls


LARGE: dict[str, Callable[[Any], object]] = {
    "of an object": lambda block: block.state.large.mul_(1.5),
    "of an object inside": lambda block: block.state.inner.large.mul_(1.5),
    "in a list": lambda block: block.state.tensors[1].mul_(1.5),
}


@pytest.mark.parametrize("change", LARGE.values(), ids=LARGE.keys())
def test_a_large_tensor_that_a_later_call_changes_is_refused_once_and_copied_then(
    change: Callable[[Any], object],
) -> None:
    wanted = steps(build(change))
    model = build(change)
    engine = Engine(model)
    engine.apply(Plan(actions=(Keep(), Keep())))
    found = steps(model, lambda: engine.ledger.evict(1 << 40))
    assert [differences(*pair) for pair in zip(found, wanted, strict=True)] == [[]] * 3
    assert engine.ledger.counts.replays.total() > 4, "what saw the change is kept, others are not"


@pytest.mark.parametrize("change", LARGE.values(), ids=LARGE.keys())
def test_where_it_was_to_be_recomputed_it_is_refused_by_name(
    change: Callable[[Any], object],
) -> None:
    model = build(change)
    engine = Engine(model)
    engine.apply(Plan(actions=(Recompute(), Recompute())))
    with pytest.raises(ReplayError, match=r"its tensor 'state\.\w+' was changed in place"):
        steps(model)


def test_an_object_that_stands_is_not_read_again_for_the_objects_inside_of_it() -> None:
    watch, block = ObjectWatch(), build(lambda _: None)[0][0]
    places = [(vars(block), "state", "state")]
    watch.read(places, is_first=True)
    before = watch.read(places, is_first=False)[0]._contents
    assert watch.read(places, is_first=False)[0]._contents is before
    block.state.inner.tensor.add_(1)
    assert watch.read(places, is_first=False)[0]._contents is not before


_elsewhere = {"scale": 1.0}
_numbers = [1.0]
_number = 1.0
_named: set[str] = set()
FIRST_OUTSIDE = 6
"""The call that is the first to change what lies outside, after those that are looked at."""


class Elsewhere(Late):
    """Computes with what no module holds, and changes a part of it from a later call on."""

    factor = 1.0

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__(change)
        self.state.inner.inside = SimpleNamespace(numbers=[1.0], scale=1.0)
        total = 1.0

        def count(by: float) -> float:
            nonlocal total
            total += by
            return total

        self.count_up = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        if self.calls[0] >= FIRST_OUTSIDE:
            self.change(self)
        inside = self.state.inner.inside
        for factor in (
            *(_elsewhere["scale"], sum(_numbers), _number, 1 + 0.1 * len(_named)),
            *(self.factor, sum(inside.numbers), inside.scale, self.count_up(0.0)),
        ):
            x = x * factor
        return x + self.down(torch.tanh(self.up(x)))


def _add_to_number(block: Any) -> None:
    global _number
    _number += 0.1


OUTSIDE: dict[str, Callable[[Any], object]] = {
    "a global dictionary": lambda _: _elsewhere.update(scale=_elsewhere["scale"] + 0.1),
    "a global list": lambda _: _numbers.append(0.1),
    "a global set": lambda _: _named.add(str(len(_named))),
    "a global number": _add_to_number,
    "an attribute of its class": lambda _: setattr(Elsewhere, "factor", Elsewhere.factor + 0.1),
    "a list deep inside": lambda b: b.state.inner.inside.numbers.append(0.1),
    "a number deep inside": lambda b: setattr(
        b.state.inner.inside, "scale", b.state.inner.inside.scale + 0.1
    ),
    "a closure": lambda b: b.count_up(0.1),
}


@pytest.fixture
def as_at_first() -> Iterator[Callable[[], None]]:
    def put_back() -> None:
        global _number
        _elsewhere["scale"], Elsewhere.factor, _number = 1.0, 1.0, 1.0
        _numbers[:] = [1.0]
        _named.clear()

    put_back()
    yield put_back
    put_back()


@pytest.mark.parametrize("start", ["kept and evicted", "recomputed"])
@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_a_later_call_is_the_first_to_change_elsewhere(
    change: Callable[[Any], object], start: str, as_at_first: Callable[[], None]
) -> None:
    def made() -> nn.Module:
        as_at_first()
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(Elsewhere(change), Elsewhere(change)))

    wanted = steps(made(), number=9)
    model = made()
    engine = Engine(model)
    action = Recompute() if start == "recomputed" else Keep()
    engine.apply(Plan(actions=(action, action)))
    found = steps(model, lambda: engine.ledger.evict(1 << 40), number=9)
    assert [differences(*pair) for pair in zip(found, wanted, strict=True)] == [[]] * 9
    # the first change is shown to a replay, the second is seen by a look, the third keeps the unit
    assert engine.ledger.counts.replays.total() >= 2 * (FIRST_OUTSIDE - 1)
    assert all("which a replay would change again" in (u.pinned or "") for u in engine.units)


def test_what_is_too_much_to_read_before_each_call_is_looked_at_when_calls_have_doubled_twice(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    as_at_first: Callable[[], None],
) -> None:
    monkeypatch.setattr(outside_state, "MAX_HOMES", 1)
    change = OUTSIDE["a global dictionary"]
    model = nn.Sequential(nn.Sequential(Elsewhere(change), Elsewhere(change)))
    engine = Engine(model)
    engine.apply(Plan(actions=(Recompute(), Recompute())))
    with caplog.at_level(logging.WARNING, logger="rematic"):
        for call in range(1, 20):
            model(torch.randn(4, 6)).sum().backward()
            assert all(unit.pinned is None for unit in engine.units) == (call < 17)
    assert engine.units[0].pinned == (
        f"its forward changes global {__name__}._elsewhere['scale'], which a replay would change "
        "again"
    )
    assert (
        "it changed global tests.activations.test_late_changes._elsewhere['scale'], which it had "
        "not done when it was last looked at, 12 calls before: gradients of replays in between "
        "may be wrong"
    ) in caplog.text

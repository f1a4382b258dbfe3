"""What a forward changes outside of its unit is found before any replay (contracts 1, 4)."""

from __future__ import annotations

import itertools
import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import rematic
from rematic.activations.surroundings import Surroundings
from tests.activations.parity import Outcome, attached, differences, read_outcome

_log: list[torch.Tensor] = []
_generator = torch.Generator()


class Tally:
    def __init__(self) -> None:
        self.calls = 0
        self.inner = types.SimpleNamespace(calls=0, deepest=types.SimpleNamespace(calls=0))


class Slotted:
    __slots__ = ("calls",)


class Block(nn.Module):
    """Two layers, and what is peculiar between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.state = self.make_state()

    def make_state(self) -> Any:
        return None

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        hidden = torch.tanh(self.up(x * self.factor()))
        self.hand_out(hidden, given)
        return self.down(hidden.sin())

    def factor(self) -> float:
        return 1.0

    def hand_out(self, hidden: torch.Tensor, given: Any) -> None:
        pass

    def left(self) -> Any:
        """Returns what the calls have left behind."""
        return None


def holding(
    make: Callable[[], Any], factor: Callable[[Any], float], left: Callable[[Any], Any]
) -> type[Block]:
    """Makes a block that holds something that each call changes and depends on."""

    class Holds(Block):
        def make_state(self) -> Any:
            return make()

        def factor(self) -> float:
            return factor(self.state)

        def left(self) -> Any:
            return left(self.state)

    return Holds


def counted(calls: Callable[[Any], Any], name: Any) -> Callable[[Any], float]:
    def factor(state: Any) -> float:
        home = calls(state)
        if isinstance(home, (dict, np.ndarray)):
            home[name] += 1
            return float(home[name])
        setattr(home, name, getattr(home, name, 0) + 1)
        return float(getattr(home, name))

    return factor


class OfTheClass(Block):
    calls: ClassVar[int] = 0

    def factor(self) -> float:
        type(self).calls += 1
        return float(type(self).calls)

    def left(self) -> Any:
        return type(self).calls


class DrawsGlobally(Block):
    def factor(self) -> float:
        return float(torch.rand((), generator=_generator))

    def left(self) -> Any:
        return _generator.get_state().tolist()


class LogsGlobally(Block):
    def hand_out(self, hidden: torch.Tensor, given: Any) -> None:
        _log.append(hidden.pow(2).mean())


class CallsBack(Block):
    def hand_out(self, hidden: torch.Tensor, given: Any) -> None:
        given.results.append(hidden.pow(2).mean())


class Remembers(Block):
    def hand_out(self, hidden: torch.Tensor, given: Any) -> None:
        given.latest = hidden * 2


class TakesNext(Block):
    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return super().forward(x * next(given.scales), given)


class Draws(Block):
    """Draws from its second call on."""

    def make_state(self) -> Any:
        return [0]

    def factor(self) -> float:
        self.state[0] += 1
        return 1.0 if self.state[0] == 1 else random.random() + np.random.rand()


CHANGES = {
    "object in a list": holding(
        lambda: [Tally()], counted(lambda s: s[0], "calls"), lambda s: s[0].calls
    ),
    "object in a dict": holding(
        lambda: {"a": Tally()}, counted(lambda s: s["a"], "calls"), lambda s: s["a"].calls
    ),
    "object two objects deep": holding(
        Tally, counted(lambda s: s.inner.deepest, "calls"), lambda s: s.inner.deepest.calls
    ),
    "namespace": holding(types.SimpleNamespace, counted(lambda s: s, "calls"), lambda s: s.calls),
    "slots": holding(Slotted, counted(lambda s: s, "calls"), lambda s: s.calls),
    "array": holding(lambda: np.zeros(2), counted(lambda s: s, 0), lambda s: s.tolist()),
    "derived dict": holding(lambda: type("D", (dict,), {})(n=0), counted(lambda s: s, "n"), dict),
    "iterator": holding(lambda: itertools.count(1), next, repr),
    "random": holding(lambda: random.Random(3), lambda s: s.random(), lambda s: s.getstate()),
    "numpy": holding(
        lambda: np.random.default_rng(3), lambda s: s.random(), lambda s: str(s.bit_generator.state)
    ),
    "generator in a list": holding(
        lambda: [torch.Generator().manual_seed(3)],
        lambda s: float(torch.rand((), generator=s[0])),
        lambda s: s[0].get_state().tolist(),
    ),
    "class": OfTheClass,
    "global generator": DrawsGlobally,
    "global list": LogsGlobally,
    "list of the caller": CallsBack,
    "object of the caller": Remembers,
    "iterator of the caller": TakesNext,
}


def drive(blocks: nn.ModuleList, evict: Callable[[], object]) -> tuple[Outcome, list[Any]]:
    """Accumulates three steps."""
    losses = []
    torch.manual_seed(9), random.seed(9), np.random.seed(9), _generator.manual_seed(9)
    OfTheClass.calls = 0
    for step in range(3):
        _log.clear()
        scales = map(float, range(1, 9)) if type(blocks[0]) is TakesNext else None
        given = types.SimpleNamespace(results=[], latest=None, scales=scales)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for block in blocks:
            x = block(x, given)
        collected = [*_log, *given.results]
        loss = x.pow(2).sum() + sum(value * (i + 1) for i, value in enumerate(collected))
        if given.latest is not None:
            loss = loss + given.latest.pow(3).sum()
        evict()
        loss.backward()
        losses.append(loss)
    left = [block.left() for block in blocks]
    return read_outcome(blocks, losses), [left, random.getstate(), np.random.random()]


def make(block: type[Block]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([block(), block()])


@pytest.mark.parametrize("start", ["kept", "recomputed"])
@pytest.mark.parametrize("block", [*CHANGES.values(), Draws], ids=[*CHANGES, "late draws"])
def test_a_step_leaves_outside_what_the_plain_step_leaves(block: type[Block], start: str) -> None:
    plain, left = drive(make(block), lambda: None)
    blocks = make(block)
    with attached(nn.Sequential(blocks), kept=start == "kept") as engine:
        found, found_left = drive(blocks, lambda: engine.ledger.evict(1 << 40))
    assert differences(found, plain) == []
    assert found_left == left
    refused = [unit.pinned is not None for unit in engine.units]
    assert refused == [block is not Draws] * 2
    assert engine.ledger.counts.replays.total() == (6 if block is Draws else 0)


class Guards(CallsBack):
    def hand_out(self, hidden: torch.Tensor, given: Any) -> None:
        value = hidden.pow(2).mean()
        if not rematic.replaying():
            given.results.append(value)


def test_a_unit_that_asks_whether_it_is_replayed_is_not_kept() -> None:
    plain, blocks = drive(make(Guards), lambda: None), make(Guards)
    with attached(nn.Sequential(blocks), kept=False) as engine:
        found = drive(blocks, lambda: None)
    assert differences(found[0], plain[0]) == []
    assert engine.ledger.counts.replays.total() == 6


def test_the_reason_names_what_changes(caplog: pytest.LogCaptureFixture) -> None:
    blocks = make(CallsBack)
    with attached(nn.Sequential(blocks)):
        drive(blocks, lambda: None)
    assert [text for text in caplog.messages if "every policy" in text] == [
        f"unit '0.{i}' is kept under every policy, since it cannot be replayed: its forward "
        "changes argument 1.results, which a replay would change again. If you know better, name "
        "it in `policy.trust`."
        for i in range(2)
    ]


class Fills(Block):
    """Makes in its first call what it uses from then on."""

    def make_state(self) -> Any:
        return types.SimpleNamespace(table={}, ready=None)

    def factor(self) -> float:
        self.state.ready = "yes"
        return float(self.state.table.setdefault("factor", torch.tensor(2.0)))


class FillsAList(Block):
    def make_state(self) -> Any:
        return deque([types.SimpleNamespace(table=[])])

    def factor(self) -> float:
        table = self.state[0].table
        if not table:
            table.append(2.0)
        return float(table[0])


@pytest.mark.parametrize(("block", "num_replays"), [(Fills, 6), (FillsAList, 4)])
def test_what_is_made_once_does_not_keep_a_unit(block: type[Block], num_replays: int) -> None:
    """A list that grows once keeps the unit for that call alone."""
    plain = drive(make(block), lambda: None)
    blocks = make(block)
    with attached(nn.Sequential(blocks), kept=False) as engine:
        found = drive(blocks, lambda: None)
    assert differences(found[0], plain[0]) == []
    assert [unit.pinned for unit in engine.units] == [None, None]
    assert engine.ledger.counts.replays.total() == num_replays


def test_what_a_replay_restores_is_no_change() -> None:
    module = nn.BatchNorm1d(3)
    module.seen, module.tally = [1], Tally()
    call = ([torch.ones(1)], {"a": 1}), {}
    surroundings = Surroundings(module, call)
    module(torch.randn(4, 3))
    module.seen.append(2)
    module.tally.calls = module.tally.inner.calls = 7
    call[0][0].append(torch.ones(1))
    call[0][1]["a"] = 2
    assert surroundings.change() is None
    module.tally.inner.deepest.calls = 1
    assert surroundings.change() == "attribute 'tally'.inner.deepest.calls"

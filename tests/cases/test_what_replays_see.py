"""Groups C and D: what a replay sees of caches, precision, random numbers and state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.families import build_llama
from tests.activations.parity import differences
from tests.cases.policies import LOSSLESS, attach, one_step

IDS = torch.arange(14).view(2, 7) % 11
MASK = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]])


class Attends(nn.Module):
    """Attends over everything that a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.seen: list[torch.Tensor] = []

    def memory(self) -> list[torch.Tensor]:
        return self.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory().append(self.proj(x))
        keys = torch.cat(self.memory())
        return x + torch.softmax(x @ keys.t(), -1) @ keys


_elsewhere: dict[int, list[torch.Tensor]] = {}


class AttendsElsewhere(Attends):
    """The same over a list that no module holds, so that nobody can put it back."""

    def memory(self) -> list[torch.Tensor]:
        return _elsewhere.setdefault(id(self), [])


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(block(), block()))


def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def test_case_c1_a_cache_that_a_unit_writes_is_not_written_twice() -> None:
    wanted = one_step(stack(Attends), x())
    model = stack(Attends)
    session = attach(model)
    assert differences(one_step(model, x()), wanted) == []
    assert [len(block.seen) for block in model[0]] == [1, 1]
    assert session._engine.ledger.counts.replays.total() == 2
    session.detach()


def test_case_c1_one_that_cannot_be_put_back_keeps_the_unit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = stack(AttendsElsewhere)
    wanted = one_step(plain, x())
    model = stack(AttendsElsewhere)
    with caplog.at_level(logging.WARNING, "rematic"):
        session = attach(model)
        assert differences(one_step(model, x()), wanted) == []
        assert "unit '0.0': its activations are kept in this call: it changed global" in caplog.text
    assert [len(_elsewhere[id(block)]) for block in model[0]] == [1, 1]
    assert session._engine.ledger.counts.replays.total() == 0
    session.detach()
    _elsewhere.clear()


@pytest.mark.parametrize("policy", LOSSLESS)
@pytest.mark.parametrize(
    ("attention", "mask"),
    [("sdpa", None), ("sdpa", MASK), ("eager", None)],
    ids=["unpadded", "padded on the left", "eager"],
)
def test_case_c2_key_value_caches(attention: str, mask: torch.Tensor | None, policy: str) -> None:
    """The cache stays on where nobody turns it off: the bits are those of the plain step."""

    def build() -> Any:
        torch.manual_seed(0)
        return build_llama(attention)

    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS}
    wanted = one_step(build(), **batch)
    model = build()
    config = model.config.to_dict()
    session = attach(model, policy)
    for _ in range(2):
        model.zero_grad()
        with session.step(batch):
            assert differences(one_step(model, **batch), wanted) == []
    assert model.config.to_dict() == config
    model.eval()
    before = [unit.num_forwards for unit in session._engine.units]
    generated = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 10)
    assert [unit.num_forwards for unit in session._engine.units] == before
    session.detach()
    assert model.config.use_cache


@pytest.mark.parametrize("use_cache", [None, False], ids=["left alone", "turned off"])
def test_case_c2_the_log_says_what_a_cache_costs_and_how_to_do_without(
    use_cache: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_llama("sdpa")
    session = attach(model)
    with caplog.at_level(logging.WARNING, "rematic"):
        for _ in range(2):
            output = model(input_ids=IDS, labels=IDS, use_cache=use_cache)
            output.loss.backward()
    told = "Pass `use_cache=False` in training to do without"
    assert caplog.text.count(told) == (1 if use_cache is None else 0)
    assert (output.cache is None) == (use_cache is False)
    session.detach()


class Precise(nn.Module):
    """Leaves autocast for a part, and has another dtype in another part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(self.mid(y.float()))
        with torch.autocast("cpu", torch.float16):
            return x + self.down(y)


@pytest.mark.parametrize("policy", LOSSLESS)
@pytest.mark.parametrize("around", ["forward only", "both passes", "none"])
def test_case_c5_autocast_of_every_kind(around: str, policy: str) -> None:
    def step(model: nn.Module) -> Any:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=around != "none"):
            loss = model(x()).float().square().sum()
            if around == "both passes":
                loss.backward()
        if around != "both passes":
            loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters())]

    wanted = step(stack(Precise))
    model = stack(Precise)
    session = attach(model, policy)
    for _ in range(2):
        model.zero_grad()
        assert all(map(torch.equal, step(model), wanted))
    session.detach()


class Stateful(nn.Module):
    """Dropout, running statistics, and a load that is summed up in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.load: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(x))
        load = (y.detach() > 0).sum()
        self.load = load if self.load is None else self.load + load
        self.calls += 1
        return x + self.down(self.drop(torch.tanh(y)))


@pytest.mark.parametrize("policy", LOSSLESS)
def test_cases_d1_d2_d3_state_is_that_of_the_plain_run(policy: str) -> None:
    def steps(model: nn.Module) -> Any:
        for _ in range(3):
            outcome = one_step(model, x())
        return outcome, [(int(block.load), block.calls) for block in model[0]]

    wanted, loads = steps(stack(Stateful))
    model = stack(Stateful)
    session = attach(model, policy)
    found, found_loads = steps(model)
    assert differences(found, wanted) == []  # generator and running statistics included
    assert found_loads == loads
    assert [int(block.norm.num_batches_tracked) for block in model[0]] == [3, 3]
    session.detach()


class Drops(nn.Module):
    """Half of what it computes is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Normalizes(Drops):
    """Its running statistics change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.BatchNorm1d(8)


class CountsItsLoad(Drops):
    """Makes a count in its first call and adds to it from then on."""

    load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum(0).float()
        self.load = count if self.load is None else self.load + count
        return super().forward(x)


def _three_steps(model: nn.Module) -> list[Any]:
    outcomes = []
    for i in range(3):
        model.zero_grad()
        outcomes.append(one_step(model, x() + i))
    return outcomes


@pytest.mark.parametrize("policy", LOSSLESS)
@pytest.mark.parametrize(
    "block",
    [Drops, Normalizes, CountsItsLoad],
    ids=["case d1 dropout", "case d2 running statistics", "case d3 a count"],
)
def test_case_d1_to_d3_random_numbers_and_state(block: type[Drops], policy: str) -> None:
    plain = stack(block)
    wanted = _three_steps(plain)
    model = stack(block)
    session = attach(model, policy)
    found = _three_steps(model)
    assert [differences(*pair) for pair in zip(found, wanted, strict=True)] == [[]] * 3
    for unit, other in zip(model[0], plain[0], strict=True):
        if isinstance(unit, CountsItsLoad):
            assert torch.equal(unit.load, other.load)
        if isinstance(unit, Normalizes):
            assert int(unit.drop.num_batches_tracked) == 3
    assert [unit.pinned for unit in session._engine.units] == [None, None]
    session.detach()


def test_case_d1_there_is_no_switch_that_leaves_random_numbers_alone() -> None:
    with pytest.raises(ValueError, match="preserve_rng"):
        attach(stack(Drops), recipe={"policy": {"preserve_rng": False}})

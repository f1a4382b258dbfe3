"""The safety check of the first call, and hooks that a replay leaves out."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import rematic
from rematic.activations import Engine, ReplayError
from rematic.policy import Plan, Recompute
from tests.activations.families import FAMILIES, Family
from tests.activations.parity import make, run_steps


class NumpyNoise(nn.Module):
    """Draws from a generator that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.default_rng().normal(size=6)).float()
        return self.down((self.up(x) + noise).sin())


class SystemNoise(NumpyNoise):
    """Draws from the system, where nothing can be put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin() * random.SystemRandom().random())


class GrowingList(NumpyNoise):
    """Attends over what earlier calls left behind, in a container that nobody puts back."""

    memory: ClassVar[dict[int, list[torch.Tensor]]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.memory.setdefault(id(self), [])
        seen.append(self.up(x).detach())
        return self.down((torch.cat(seen) @ x.T).T.sin() @ torch.ones(len(seen) * 4, 6))


UNSAFE = {
    "numpy": (NumpyNoise, "makes other values at position"),
    "system": (SystemNoise, "makes other values at position"),
    "grows": (GrowingList, "makes other values at position"),
}


def recomputed(block: type[nn.Module], **options: Any) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(block(), block()))
    engine = Engine(model, **options)
    engine.apply(Plan(actions=(Recompute(), Recompute())))
    return model, engine


@pytest.mark.parametrize(("block", "reason"), UNSAFE.values(), ids=UNSAFE.keys())
def test_a_unit_that_does_not_do_the_same_twice_is_kept_and_named(
    block: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, engine = recomputed(block)
    with caplog.at_level(logging.WARNING, logger="rematic"):
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
    assert engine.ledger.counts.replays.total() == 0
    warnings = [record.getMessage() for record in caplog.records]
    assert [w.split(":")[0] for w in warnings] == [
        f"unit '0.{i}' is kept under every policy, since it cannot be replayed" for i in range(2)
    ]
    assert reason in warnings[0]
    assert warnings[0].endswith("If you know better, name it in `policy.trust`.")
    assert all(unit.pinned is not None for unit in engine.units)


class MaybeNoisy(nn.Module):
    """Draws from outside torch, or not, as it was configured."""

    def __init__(self, noise: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = getattr(self.noise, "scale", self.noise)
        values = np.random.default_rng().normal(size=6) if noise else np.zeros(6)
        return torch.tanh(self.proj(x) * (1 + torch.from_numpy(values).float()))


@dataclasses.dataclass
class NoiseConfig:
    scale: float


@pytest.mark.parametrize(
    "noises", [(0.0, 0.5), (False, True), (NoiseConfig(0.0), NoiseConfig(0.5))], ids=str
)
def test_units_of_one_class_with_other_settings_are_checked_each(noises: Any) -> None:
    model = nn.Sequential(nn.Sequential(*map(MaybeNoisy, (*noises, *noises))))
    engine = Engine(model)
    model(torch.randn(4, 6)).sum().backward()
    assert [unit.pinned is None for unit in engine.units] == [True, False, True, False]


def test_units_that_differ_in_their_number_alone_are_checked_once() -> None:
    model = nn.Sequential(nn.Sequential(*(MaybeNoisy(0.0) for _ in range(4))))
    for i, block in enumerate(model[0]):
        block.layer_idx, block.drop_path = i, 0.1 * (i + 1)
    engine = Engine(model)
    model(torch.randn(4, 6)).sum().backward()
    assert len(engine.ledger.verdicts) == 1


class Recurrent(nn.Module):
    """Its kernel returns a workspace with gaps that hold whatever was in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.2)
        self.down = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.lstm(x)[0])


def test_gaps_in_the_workspace_of_a_kernel_are_no_objection() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()))

    def outcome() -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        junk = [torch.full((1 << n,), float("nan")) for n in range(18)]
        del junk  # what the next workspace may be made of
        loss = model(torch.ones(5, 3, 6)).pow(2).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted = outcome()
    engine = Engine(model)
    engine.apply(Plan(actions=(Recompute(), Recompute())))
    for _ in range(3):
        for a, b in zip(outcome(), wanted, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
    assert [unit.pinned for unit in engine.units] == [None, None]
    assert engine.ledger.counts.replays.total() == 6


def test_a_trusted_unit_is_not_checked() -> None:
    model, engine = recomputed(GrowingList, trust=("0.*",))
    with pytest.raises(ReplayError, match="the replay of unit"):
        model(torch.randn(4, 6)).sum().backward()
    assert engine.ledger.verdicts == {}


class Gathered(nn.Module):
    """Has its weights only while its hooks lend them, as weights that are sharded or offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        weight = self.inner.weight.data
        nothing = torch.empty(0)

        def gather(module: nn.Module, args: Any) -> None:
            self.inner.weight.data = weight

        def release(module: nn.Module, args: Any, output: Any) -> None:
            self.inner.weight.data = nothing

        self.inner.register_forward_pre_hook(gather)
        self.inner.register_forward_hook(release)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x).sin())


class Raises(NumpyNoise):
    """Runs once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rematic.replaying():
            raise RuntimeError("no second time")
        return self.down(self.up(x).sin())


def test_what_goes_wrong_where_it_is_trusted_is_told_with_the_remedy() -> None:
    model, _ = recomputed(Gathered, trust=("*",))
    with pytest.raises(
        ReplayError, match=r"replay of unit '0\.1' .* take the unit out of `policy\.trust`"
    ):
        model(torch.randn(4, 6)).sum().backward()
    model, _ = recomputed(Raises, trust=("*",))
    with pytest.raises(ReplayError, match=r"'0\.1' fails: no second time\. .* `policy\.trust`"):
        model(torch.randn(4, 6)).sum().backward()
    model, engine = recomputed(Gathered)
    model(torch.randn(4, 6)).sum().backward()
    assert engine.ledger.counts.replays.total() == 2


def test_trust_in_a_unit_that_does_not_exist_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Sequential(NumpyNoise(), NumpyNoise()))
    with pytest.raises(ValueError, match="matches none of the 2 modules"):
        Engine(model, trust=("layers.*",))
    assert "forward" not in model[0][0].__dict__


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_families_pass_by_one_replay_of_each_class(family: Family) -> None:
    model = make(family)
    engine = Engine(model)
    run_steps(model, family)
    assert [verdict.objection for verdict in engine.ledger.verdicts.values()] == [None]
    assert [unit.pinned for unit in engine.units] == [None] * len(engine.units)


class TestHooks:
    """Hooks on modules inside a unit."""

    @staticmethod
    def hooked(kind: str, result: Any) -> tuple[Counter[str], nn.Module, Engine]:
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))  # noqa: E731
        model = nn.Sequential(nn.Sequential(block(), block()))
        calls: Counter[str] = Counter()

        def hook(module: nn.Module, args: Any, output: Any = None) -> Any:
            calls[kind] += 1
            return result(args, output)

        getattr(model[0][0][1], f"register_{kind}")(hook)
        engine = Engine(model)
        engine.apply(Plan(actions=(Recompute(), Recompute())))
        return calls, model, engine

    @pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
    def test_a_hook_that_looks_on_sees_each_forward_once(self, kind: str) -> None:
        calls, model, engine = self.hooked(kind, lambda args, output: None)
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
        assert calls[kind] == 3
        assert engine.ledger.counts.replays.total() == 6

    @pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
    def test_a_hook_that_changes_something_runs_in_replays_too(self, kind: str) -> None:
        def doubled(args: Any, output: Any) -> Any:
            return args[0] * 2 if output is None else output * 2

        gradients = []
        for attached in (False, True):
            calls, model, engine = self.hooked(kind, doubled)
            if not attached:
                engine.detach()
            torch.manual_seed(3)
            model(torch.randn(4, 6)).sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        # forward, the safety check, the look for hidden tensors, the replay
        assert calls[kind] == 4

    @pytest.mark.parametrize("everywhere", [False, True], ids=["inside", "of all modules"])
    def test_a_hook_that_comes_later_sees_each_forward_once(self, everywhere: bool) -> None:
        _, model, engine = self.hooked("forward_hook", lambda args, output: None)
        model(torch.randn(4, 6)).sum().backward()
        inner = model[0][1][2]
        calls: Counter[nn.Module] = Counter()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[module] += 1

        register = register_module_forward_hook if everywhere else inner.register_forward_hook
        handle = register(hook)
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
        handle.remove()
        assert calls[inner] == 3
        assert set(calls.values()) == {3}
        assert engine.ledger.counts.replays.total() == 8

    def test_a_silent_hook_that_acts_on_its_module_is_found_out(self) -> None:
        """As ZeRO-3 does, which gathers weights in one hook and lets them go in another."""
        torch.manual_seed(0)
        inner = nn.Linear(6, 6)
        weight = inner.weight.detach().clone()

        def gather(module: nn.Module, args: Any) -> None:
            module.scale = weight.sum()

        def release(module: nn.Module, args: Any, output: Any) -> None:
            del module.scale

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.out = Reads(), nn.Linear(6, 6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.out(self.inner(x).sin())

        class Reads(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.scale

        model = nn.Sequential(nn.Sequential(Scaled(), Scaled()))
        for block in model[0]:
            block.inner.register_forward_pre_hook(gather)
            block.inner.register_forward_hook(release)
        engine = Engine(model)
        engine.apply(Plan(actions=(Recompute(), Recompute())))
        model(torch.randn(4, 6)).sum().backward()
        assert engine.ledger.counts.replays.total() == 2
        assert [unit.pinned for unit in engine.units] == [None, None]

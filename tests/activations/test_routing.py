"""Routers of mixtures of experts: their decisions outlive an eviction (case D6)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations import Engine
from rematic.activations.routers import find_routers
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Plan, Recompute, Selective
from tests.activations.parity import Outcome, differences, read_outcome

WIDTH = 8
_noise = random.Random(0)  # not the generator of the module `random`, so nobody restores it


class NoisyRouter(nn.Module):
    """Sends each token to one of two experts, with noise from outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.drop(self.proj(x))
        noise = torch.tensor([_noise.gauss(0, 1) for _ in range(logits.numel())])
        weights, chosen = torch.topk((logits + noise.view_as(logits)).softmax(-1), 1)
        weights /= weights.sum(-1, keepdim=True) + 0.5
        return weights, chosen


class CastingRouter(NoisyRouter):
    """Saves a copy of its input in another dtype, which is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.proj.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = super().forward(x.double())
        return weights.float(), chosen


class JitterRouter(NoisyRouter):
    """Draws from torch's generator as well."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)


class MoE(nn.Module):
    """Two experts; the tokens of each are gathered, so that shapes depend on the router."""

    def __init__(self, router: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate = router()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        weights, chosen = self.choose(tokens)
        output = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            output = output.index_add(0, rows, weights[rows] * torch.tanh(expert(tokens[rows])))
        return x + self.drop(output)

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(tokens)


class ChoosingMoE(MoE):
    """Chooses outside of its router, with ties that another run breaks in another way."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, 2))

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ties = self.gate(tokens).round()
        sign = _noise.choice([-1.0, 1.0]) * 1e-3 * torch.arange(2)
        weights, chosen = torch.topk((ties + sign).softmax(-1), 1)
        return weights, chosen


ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "noise": lambda: MoE(NoisyRouter),
    "cast": lambda: MoE(CastingRouter),
    "jitter": lambda: MoE(JitterRouter),
}


def make(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*[block() for _ in range(3)]))


def step(model: nn.Module, evict: Callable[[], object] = lambda: None) -> Outcome:
    torch.manual_seed(9)
    _noise.seed(4)
    loss = model(torch.randn(12, WIDTH)).square().sum()
    evict()
    loss.backward()
    return read_outcome(model, [loss])


def applied(engine: Engine, action: Any) -> Engine:
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    return engine


@pytest.mark.parametrize("action", [Recompute(), Selective(), Keep()], ids=lambda a: a.name)
@pytest.mark.parametrize("block", ROUTERS.values(), ids=ROUTERS.keys())
def test_case_d6_tokens_go_where_forward_sent_them(
    block: Callable[[], nn.Module], action: Any
) -> None:
    wanted = step(make(block))
    model = make(block)
    # (a router that runs again in the check draws noise that forward would have drawn)
    trust = ["*"] if isinstance(model[0][0].gate, CastingRouter) else []
    engine = applied(Engine(model, trust=trust), action)
    for _ in range(3):
        model.zero_grad()
        found = step(model, lambda: engine.ledger.evict(1 << 30))
        assert differences(found, wanted) == []
    assert [unit.pinned for unit in engine.units] == [None] * 3
    assert engine.ledger.counts.replays.total() == 9
    engine.detach()
    assert all("forward" not in part.__dict__ for part in model.modules())


def test_case_d6_without_pinning_the_check_flags_it() -> None:
    model = make(ROUTERS["noise"])
    engine = applied(Engine(model, routers=["*.norm"]), Recompute())
    for _ in range(2):
        step(model)
    assert all("replay" in str(unit.pinned) for unit in engine.units)
    engine.detach()


def test_a_router_with_noise_alone_does_not_run_in_replays() -> None:
    """So its noise goes on as in the plain run, for any number of steps."""

    def run(model: nn.Module) -> Outcome:
        torch.manual_seed(9)
        _noise.seed(4)
        losses = []
        for _ in range(3):
            losses.append(model(torch.randn(12, WIDTH)).square().sum())
            losses[-1].backward()
        return read_outcome(model, losses)

    wanted = run(make(ROUTERS["noise"]))
    model = make(ROUTERS["noise"])
    engine = applied(Engine(model), Recompute())
    assert differences(run(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 9
    engine.detach()


def test_what_a_block_chooses_outside_of_its_router_is_kept_too() -> None:
    wanted = step(make(ChoosingMoE))
    model = make(ChoosingMoE)
    engine = applied(Engine(model, trust=["*"]), Recompute())
    for _ in range(4):
        model.zero_grad()
        chosen = step(model)
        assert [unit.pinned for unit in engine.units] == [None] * 3
    assert {name: g.shape for name, g in chosen.gradients.items() if g is not None} == {
        name: g.shape for name, g in wanted.gradients.items() if g is not None
    }
    engine.detach()


def test_decisions_are_small_and_nothing_else_stays() -> None:
    def held(routers: list[str]) -> int:
        model = make(ROUTERS["noise"])
        engine = applied(Engine(model, routers=routers, trust=["*"]), Recompute())
        x = torch.randn(12, WIDTH)
        model(x)
        with SimulatedProbe() as probe:
            output = model(x)
            num_bytes = probe.allocated_bytes()
        del output
        engine.detach()
        assert num_bytes is not None
        return num_bytes

    # saved by softmax, top-k and division: 2 and 1 floats, 1 integer, 2 floats; the weights and the
    # choice themselves are kept as well
    assert held([]) - held(["*.experts"]) == 3 * 12 * (8 + 4 + 8 + 8 + 4 + 8)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_jitter_noise=0.1,
    )
    return MixtralForCausalLM(config).train()


@pytest.mark.parametrize("action", [Recompute(), Selective()], ids=lambda a: a.name)
def test_case_d6_mixtral(action: Any) -> None:
    def run(model: nn.Module) -> Outcome:
        torch.manual_seed(9)
        ids = torch.arange(14).view(2, 7) % 11
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return read_outcome(model, [loss])

    wanted = run(mixtral())
    model = mixtral()
    engine = applied(Engine(model), action)
    assert [type(r).__name__ for u in engine.units for r in find_routers(u.module)] == [
        "MixtralTopKRouter"
    ] * 2
    for _ in range(2):
        model.zero_grad()
        assert differences(run(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 4
    engine.detach()


def test_case_d6_mixtral_keeps_what_selective_says_though_its_top_k_is_changed_in_place() -> None:
    model = mixtral()
    engine = applied(Engine(model), Selective())
    ids = torch.arange(14).view(2, 7) % 11
    tokens, pairs = 14, 14 * 2  # each token goes to two experts
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        kept = [record.own_bytes() for record in engine.ledger.records()]
        loss.backward()
    products = tokens * (8 + 4 + 4 + 8 + 4)  # query, key, value, output, router
    attention = tokens * (8 + 2)  # with the logarithm of the sum for each head
    experts = pairs * (2 * 16 + 8)
    choices = tokens * 2 * (4 + 8) + pairs * (8 + 8)  # top-k, order of the pairs by expert
    assert kept == [(products + attention + experts) * 4 + choices] * 2
    engine.detach()


def test_routers_are_no_units_unless_they_are_named() -> None:
    model = nn.ModuleDict({"gates": nn.ModuleList([MoE(NoisyRouter).gate for _ in range(2)])})
    with pytest.raises(ValueError, match="found no stack"):
        Engine(model)
    stack = make(ROUTERS["noise"])
    engine = Engine(stack, ["*.gate", "*.norm"])
    assert list(engine.classes) == ["0.0.norm", "0.1.norm", "0.2.norm"]
    engine.detach()
    engine = Engine(stack, ["NoisyRouter"])
    assert list(engine.classes) == ["0.0.gate", "0.1.gate", "0.2.gate"]
    engine.detach()


def test_a_recipe_names_routers_of_its_own() -> None:
    model = make(ROUTERS["noise"])
    recipe = {"policy": {"start": "recompute", "routers": ["*.norm"]}}
    session = rematic.attach(model, recipe=recipe)
    for _ in range(2):
        step(model)
    assert all(unit.pinned for unit in session._engine.units)
    session.detach()
    with pytest.raises(ValueError, match=r"^the router pattern 'nobody' matches no module"):
        rematic.attach(model, recipe={"policy": {"start": "keep", "routers": ["nobody"]}})


def test_what_holds_the_model_may_be_left_out_of_a_router() -> None:
    stack = make(ROUTERS["noise"])
    held = nn.ModuleDict({"model": stack})
    (router,) = find_routers(held, ["0.1.norm"])
    assert router is stack.get_submodule("0.1.norm")
    assert find_routers(held, ["norm"]) == []


class Twice(nn.Module):
    """A router, and an expert of low rank whose product has the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.out = nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return x + self.out(torch.tanh(self.experts(x)) * weights)


def test_kept_results_of_other_ops_are_not_taken_for_those_of_the_router() -> None:
    wanted = step(make(Twice))
    model = make(Twice)
    engine = applied(Engine(model), Selective())
    for _ in range(2):
        model.zero_grad()
        assert differences(step(model), wanted) == []
    assert engine.ledger.counts.replays.total() == 6
    engine.detach()

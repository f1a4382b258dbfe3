"""Group A: inputs that need no gradient, adapters, and who decides about recomputation."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rematic import ReplayError
from rematic.policy import Keep, Policy, Recompute, Rule
from rematic.recipes import RecipeError
from tests.activations.families import build_llama
from tests.activations.parity import differences
from tests.cases.policies import LOSSLESS, attach, one_step

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.arange(14).view(2, 7) % 11


class Adapted(nn.Module):
    """A frozen weight with a trainable low-rank part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class HandFrozen(nn.Module):
    """The first block is given the output of a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted(), Adapted()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def make() -> HandFrozen:
    torch.manual_seed(0)
    return HandFrozen()


FIRST = Policy(name="first", rules=(Rule(pattern="blocks.0", action=Recompute()),), default=Keep())


@pytest.mark.parametrize("policy", [FIRST, *LOSSLESS], ids=lambda p: getattr(p, "name", p))
def test_case_a1_every_trainable_weight_has_its_gradient(policy: Any) -> None:
    wanted = one_step(make(), IDS)
    model = make()
    session = attach(model, policy)
    for _ in range(2):
        model.zero_grad()
        with warnings.catch_warnings(), session.step(IDS):
            warnings.simplefilter("error")
            assert differences(one_step(model, IDS), wanted) == []
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.any() for p in trainable)
    session.detach()


@pytest.mark.parametrize("input_grads", [False, True])
def test_case_a1_adapters_of_peft(input_grads: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model: Any = get_peft_model(build_llama("sdpa"), config)
        if input_grads:
            model.enable_input_require_grads()
        return model

    wanted = one_step(build(), input_ids=IDS, labels=IDS)
    model = build()
    session = attach(model)
    for _ in range(2):
        model.zero_grad()
        assert differences(one_step(model, input_ids=IDS, labels=IDS), wanted) == []
    assert session._engine.ledger.counts.replays.total() == 6
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.any() for p in trained)
    session.detach()


@pytest.mark.parametrize(
    "section", [{"use_reentrant": True}, {"preserve_rng": False}, {"start": "reentrant"}]
)
def test_case_a2_there_is_no_second_variant_to_choose(section: dict[str, Any]) -> None:
    """Nor a switch that leaves the generators as they are (case D1): unknown keys are refused."""
    with pytest.raises(RecipeError, match=next(iter(section))):
        attach(make(), recipe={"policy": section})


def gathered(model: nn.Module) -> nn.Module:
    """Puts every linear layer's weights there for its forward and backward only, as ZeRO-3 does."""
    whole = {p: p.data.clone() for p in model.parameters()}

    def put(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter]

    def take(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            take(module)
            module.register_forward_pre_hook(put)
            module.register_forward_hook(take)
            module.register_full_backward_pre_hook(put)
    return model


def adapted_blocks(*, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted(), Adapted())
    return model if frozen else model.requires_grad_(True)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("policy", LOSSLESS)
def test_case_e4_weights_that_are_there_for_a_moment(policy: Any, frozen: bool) -> None:
    """The check on the first batch finds hooks that a replay needs; without it that is an error."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = adapted_blocks(frozen=frozen)
    one_step(plain, x)
    wanted = [p.grad for p in plain.parameters() if p.requires_grad]
    for trusted in ([], ["*"]):
        model = gathered(adapted_blocks(frozen=frozen))
        session = attach(model, policy, recipe={"policy": {"trust": trusted}})
        for _ in range(2):
            model.zero_grad()
            refusing = pytest.raises(ReplayError, match="Its forward does not do the same twice")
            refused = trusted and policy in (
                "planned",
                "selective",
                "recompute",
                "recompute+offload",
            )
            with refusing if refused else contextlib.nullcontext():
                one_step(model, x)
            if refused:
                break
            found = [p.grad for p in model.parameters() if p.requires_grad]
            assert all(map(torch.equal, found, wanted))
        session.detach()

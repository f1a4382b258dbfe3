"""Plans are applied exactly, counted exactly (G1), and there is one owner of a module."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import Engine
from rematic.policy import KEEP, RECOMPUTE, Keep, Plan, Policy, Recompute, Rule, resolve
from tests.activations.blocks import Block, Model, make_input, make_model
from tests.activations.families import FAMILIES, LLAMA_EAGER, Family
from tests.activations.parity import attached, differences, make, run_steps
from tests.activations.test_units import _t5, _vit


class CountsCalls(Block):
    calls: Counter[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountsCalls.calls[id(self)] += 1
        return super().forward(x)


def _rules(*rules: tuple[str, Any], default: Any = None) -> Policy:
    return Policy(
        name="rules",
        rules=tuple(Rule(pattern=pattern, action=action) for pattern, action in rules),
        default=default,
    )


TABLE = {
    "keep": (KEEP, [1, 1, 1, 1]),
    "recompute": (RECOMPUTE, [2, 2, 2, 2]),
    "every other": (_rules(("*.[02]", Recompute()), default=Keep()), [2, 1, 2, 1]),
    "first two": (_rules(("*.[01]", Recompute()), default=Keep()), [2, 2, 1, 1]),
    "last rule wins": (
        _rules(("CountsCalls", Recompute()), ("blocks.3", Keep()), default=Keep()),
        [2, 2, 2, 1],
    ),
    "one by name": (_rules(("blocks.2", Recompute()), default=Keep()), [1, 1, 2, 1]),
}


@pytest.mark.parametrize(("policy", "expected"), TABLE.values(), ids=TABLE.keys())
def test_every_block_runs_as_often_as_its_action_says(policy: Policy, expected: list[int]) -> None:
    CountsCalls.calls = Counter()
    model = make_model(CountsCalls, 4)
    engine = Engine(model, trust=("*",))  # the safety check would run one block once more
    actions = resolve(policy, engine.classes)
    engine.apply(Plan(actions=tuple(action or Recompute() for action in actions)))
    model(make_input()).backward()
    engine.detach()
    assert [CountsCalls.calls[id(block)] for block in model.blocks] == expected
    assert [unit.num_forwards for unit in engine.units] == [1, 1, 1, 1]


def test_a_plan_holds_for_the_next_forward_and_not_for_graphs_that_exist() -> None:
    CountsCalls.calls = Counter()
    model = make_model(CountsCalls)
    with attached(model, kept=True, trusted=True) as engine:  # it counts outside of the unit
        loss = model(make_input())
        engine.apply(Plan(actions=(Recompute(),) * 3))
        loss.backward()
        assert engine.ledger.counts.replays.total() == 0
        model(make_input()).backward()
        assert engine.ledger.counts.replays.total() == 3


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_parameters_are_not_part_of_a_plan(family: Family) -> None:
    with attached(make(family)) as engine:
        assert len(set(engine.classes.values())) == 1
        assert list(engine.classes) == list(family.units)


# --- other shapes of models -----------------------------------------------------------------------


def _t5_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = batch["input_ids"]
    loss: torch.Tensor = model(
        input_ids=ids, attention_mask=batch["attention_mask"], labels=ids
    ).loss
    return loss


def _vit_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    loss: torch.Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    return loss


T5 = Family(
    name="t5", build=lambda: _t5().train(), batch=LLAMA_EAGER.batch, loss=_t5_loss, units=()
)
VIT = Family(
    name="vit", build=lambda: _vit().train(), batch=LLAMA_EAGER.batch, loss=_vit_loss, units=()
)


@pytest.mark.parametrize("kept", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("family", [T5, VIT], ids=str)
def test_encoders_and_decoders_have_the_bits_of_the_plain_step(family: Family, kept: bool) -> None:
    plain = run_steps(make(family), family)
    model = make(family)
    with attached(model, kept=kept) as engine:
        found = run_steps(model, family)
    assert differences(found, plain) == []
    assert engine.ledger.counts.replays.total() == (0 if kept else 2 * len(engine.units))


# --- one owner ------------------------------------------------------------------------------------


def test_a_model_is_attached_once() -> None:
    model = make_model()
    message = (
        "module 'blocks.0' is already managed by a session: expected a model that is not attached. "
        "Call `session.detach()` first."
    )
    with attached(model):
        before = [block.forward for block in model.blocks]
        with pytest.raises(ValueError, match=re.escape(message)):
            Engine(model)
        assert [block.forward for block in model.blocks] == before
    Engine(model).detach()


@pytest.mark.parametrize("name", ["the model", "inner"])
def test_a_model_that_is_copied_to_several_devices_is_refused(name: str) -> None:
    parallel = nn.DataParallel(make_model())
    model = nn.ModuleDict({"inner": parallel}) if name == "inner" else parallel
    parallel.device_ids = [0, 1]  # without devices torch itself leaves them out
    message = (
        f"{name} is an nn.DataParallel over the devices [0, 1], which calls copies of the units: "
        "expected one device for each process. Train with DistributedDataParallel (`torchrun`), or "
        "train the module inside, its `.module`, on one device."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Engine(model)
    assert not any("forward" in vars(module) for module in model.modules())
    parallel.device_ids = [0]  # calls the module itself
    Engine(model).detach()


def test_a_pattern_that_matches_nothing_leaves_the_model_alone() -> None:
    model = Model()
    with pytest.raises(ValueError, match="matches none"):
        Engine(model, ["blocks.0", "nothing.*"])
    assert not any("forward" in vars(module) for module in model.modules())

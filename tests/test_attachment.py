"""`rematic.attach`: what it takes, what it refuses, and that it undoes itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import rematic
from rematic.memory import SimulatedProbe
from rematic.policy import ACTIONS, KEEP, PLANNED, RECOMPUTE, Policy, policy_named
from rematic.recipes import (
    ActionConfig,
    KeepConfig,
    MemoryConfig,
    PolicyConfig,
    Recipe,
    RecomputeConfig,
    RuleConfig,
    parse_budget,
)
from rematic.recipes.policy_schema import Start
from tests.activations.blocks import Model, make_input, make_model
from tests.activations.families import build_llama
from tests.events import Events


def _weights(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _session(**options: Any) -> rematic.Session:
    return rematic.attach(make_model(), **{"probe": SimulatedProbe(), **options})


# Options, and the policy and budget that come of them.
GIVEN: dict[str, tuple[dict[str, Any], Policy, int | None]] = {
    "a size": ({"budget": "1GiB"}, PLANNED, 1 << 30),
    "bytes": ({"budget": 1 << 20}, PLANNED, 1 << 20),
    "a share": ({"budget": 0.5, "probe": SimulatedProbe(1 << 22)}, PLANNED, 1 << 21),
    "a fixed policy without a budget": ({"policy": "recompute"}, RECOMPUTE, None),
    "a policy of one's own": ({"policy": KEEP, "budget": "1MiB"}, KEEP, 1 << 20),
    "a recipe": (
        {
            "recipe": Recipe(
                memory=MemoryConfig(budget=parse_budget("2MiB")),
                policy=PolicyConfig(start="recompute"),
            )
        },
        RECOMPUTE,
        2 << 20,
    ),
    "arguments before the recipe": (
        {
            "recipe": Recipe(
                memory=MemoryConfig(budget=parse_budget("2MiB")),
                policy=PolicyConfig(start="recompute"),
            ),
            "budget": "1MiB",
            "policy": "keep",
        },
        KEEP,
        1 << 20,
    ),
}


@pytest.mark.parametrize(("options", "policy", "budget"), GIVEN.values(), ids=GIVEN.keys())
def test_arguments_and_recipes_are_taken(
    options: dict[str, Any], policy: Policy, budget: int | None
) -> None:
    session = _session(**options)
    assert session.policy == policy
    assert session.budget_bytes == budget
    session.detach()


def test_a_recipe_names_units_and_rules() -> None:
    rules = (
        RuleConfig(match="Linear", action=RecomputeConfig()),
        RuleConfig(match="*.1.up", action=KeepConfig()),
    )
    recipe = Recipe(policy=PolicyConfig(start="keep", units=("*.up",), rules=rules))
    session = _session(recipe=recipe)
    session.run(lambda x: session.model(x).backward(), make_input())
    assert session.plan.counts() == {"recompute": 2, "keep": 1}
    assert [action.name for action in session.plan.actions] == ["recompute", "keep", "recompute"]
    session.detach()


def test_a_recipe_file_is_taken_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("memory: {budget: 3MiB}\npolicy: {start: keep}\n", encoding="utf-8")
    session = _session(recipe=path)
    assert (session.policy, session.budget_bytes) == (KEEP, 3 << 20)
    session.detach()


def _refused_twice() -> rematic.Session:
    model = make_model()
    rematic.attach(model, policy="keep")
    return rematic.attach(model, policy="keep")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "smaller than the weights": (
        lambda: _session(budget=1000),
        r"^the budget is 1000 B but the model's weights and buffers alone take 1\.7 KiB: expected "
        r"a budget that holds them, their gradients, the optimizer's state and the activations of "
        r"one unit\. Raise `memory\.budget` or take a smaller model\.$",
    ),
    "a CPU without a budget": (
        lambda: _session(),
        r"^no budget for a model on the CPU: expected one, since other programs use the same "
        r"memory\. Write for example `budget='8GiB'` .* a fixed policy such as",
    ),
    "auto on a CPU": (lambda: _session(budget="auto"), "^no budget for a model on the CPU"),
    "a share of what is unknown": (
        lambda: _session(budget=0.5),
        r"^the budget is 0\.5, a share of the device, but the capacity of cpu is not known: "
        r"expected a size\. Write for example `budget: 20GiB`\.$",
    ),
    "attached already": (_refused_twice, "^module 'blocks.0' is already managed by a session"),
    "unknown policy": (lambda: _session(policy="fast"), "^unknown policy 'fast': expected one of"),
    "a rule that matches nothing": (
        lambda: _session(
            recipe=Recipe(
                policy=PolicyConfig(
                    start="keep", rules=(RuleConfig(match="layers.*", action=KeepConfig()),)
                )
            )
        ),
        r"^pattern 'layers\.\*' matches none of the 3 modules",
    ),
    "a unit that matches nothing": (
        lambda: _session(policy="keep", recipe=Recipe(policy=PolicyConfig(units=("layers.*",)))),
        r"^pattern 'layers\.\*' matches none of the 11 modules",
    ),
    "no stack": (
        lambda: rematic.attach(torch.nn.Linear(2, 2), policy="keep"),
        "^found no stack of blocks in Linear",
    ),
}


@pytest.mark.parametrize(("attach", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(attach: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach()


class Broken:
    """A journal on a full disk."""

    def write(self, event: Mapping[str, Any]) -> None:
        raise OSError("no space left on device")


FAILS: dict[str, dict[str, Any]] = {
    "rule": {
        "recipe": Recipe(
            policy=PolicyConfig(
                start="keep", rules=(RuleConfig(match="layers.*", action=KeepConfig()),)
            )
        )
    },
    "journal": {"policy": "keep", "journal": Broken()},
    "budget": {"budget": 10},
}


@pytest.mark.parametrize("options", FAILS.values(), ids=FAILS.keys())
def test_a_failed_attach_leaves_nothing_behind(options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [dict(vars(module)) for module in model.modules()]
    own_step, attributes = optimizer.step, set(vars(optimizer))
    with pytest.raises((ValueError, OSError)):
        rematic.attach(model, optimizer, **options)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert optimizer.step == own_step
    assert set(vars(optimizer)) == attributes


def test_detaching_gives_model_and_optimizer_back_and_can_be_repeated() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [dict(vars(module)) for module in model.modules()]
    attributes = set(vars(optimizer))
    session = rematic.attach(model, optimizer, policy="recompute", budget="1GiB")
    assert "step" in vars(optimizer)
    session.run(lambda x: model(x).backward(), make_input())
    optimizer.step()
    session.detach()
    session.detach()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert set(vars(optimizer)) == attributes
    again = rematic.attach(model, optimizer, policy="keep")
    again.run(lambda x: model(x).backward(), make_input())
    again.detach()


def test_detaching_inside_a_step_leaves_no_mode_behind() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model = make_model()
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=SimulatedProbe())
    session.begin_step(make_input())
    loss = model(make_input())
    session.detach()
    assert _get_current_dispatch_mode_stack() == []
    loss.backward()


def test_the_host_probe_is_the_default_on_a_cpu() -> None:
    gc.collect()
    model = make_model()
    session = rematic.attach(model, budget="4GiB")
    assert session.probe.kind == "host"
    session.run(lambda x: model(x).backward(), make_input())
    session.detach()


def test_names_and_files_are_those_of_the_model() -> None:
    model, other = make_model(), Model()
    session = rematic.attach(model, policy="recompute")
    session.run(lambda x: model(x).backward(), make_input())
    state = model.state_dict()
    assert list(state) == list(other.state_dict())
    other.load_state_dict(state)
    session.detach()


def test_a_default_recipe_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _session(recipe=Recipe(), budget="1GiB").detach()
    assert caplog.messages == []


@pytest.mark.parametrize("start", get_args(Start))
def test_what_a_recipe_may_start_with_is_a_policy(start: str) -> None:
    assert policy_named(start).name == start


def test_recipes_and_policies_know_the_same_actions() -> None:
    assert [kind.name for kind in get_args(ActionConfig)] == list(ACTIONS)


def test_a_recipe_tiles_the_loss_until_the_session_is_detached() -> None:
    model, journal = build_llama("sdpa"), Events()
    ids = torch.arange(14).view(2, 7) % 11
    plain = model(input_ids=ids, labels=ids)
    recipe = {"policy": {"start": "recompute", "tiled_loss": "always"}}
    session = rematic.attach(model, recipe=recipe, journal=journal)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain.loss)
    assert [event["kind"] for event in journal.of("notice")] == ["tiled_loss"]
    session.detach()
    assert model(input_ids=ids, labels=ids).logits is not None
    assert "forward" not in model.lm_head.__dict__


def test_a_loss_that_cannot_be_tiled_leaves_nothing_attached() -> None:
    model = make_model()
    recipe = {"policy": {"start": "recompute", "tiled_loss": "always"}}
    with pytest.raises(ValueError, match="found no language model of transformers"):
        rematic.attach(model, recipe=recipe)
    assert all("forward" not in part.__dict__ for part in model.modules())

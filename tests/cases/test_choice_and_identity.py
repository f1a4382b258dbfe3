"""Groups G, H and K: what a policy covers, what it changes, and how blocks may be called."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

import rematic
from rematic.activations import Engine
from rematic.policy import Action, Compress, Keep, Offload, Plan, Recompute, Rule, Selective, Tile
from tests.activations import peculiar_arguments
from tests.activations.families import build_llama
from tests.activations.parity import differences
from tests.activations.peculiar import Case
from tests.activations.test_peculiar import build, drive, plain_outcome
from tests.cases.policies import LOSSLESS, attach, one_step

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.arange(14).view(2, 7) % 11


class Part(nn.Module):
    """Counts its calls, replays too."""

    calls: Counter[int]

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Part.calls[id(self)] += 1
        return torch.tanh(self.proj(x))


class Attention(Part):
    """Stands for attention."""


class MLP(Part):
    """Stands for the other half."""


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def stack(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    Part.calls = Counter()
    return nn.Sequential(*[Block() for _ in range(depth)])


def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _calls(model: nn.Module, kind: type[Part]) -> list[int]:
    return [Part.calls[id(part)] for part in model.modules() if type(part) is kind]


# What each policy that ships does in its first step to attention and MLP of each of four blocks. No
# step is planned here, so that `planned` recomputes; a plan keeps what fits.
SHIPPED: dict[str, list[int]] = {
    "planned": [2, 2, 2, 2],
    "keep": [1, 1, 1, 1],
    "selective": [2, 2, 2, 2],
    "recompute": [2, 2, 2, 2],
    "recompute+offload": [2, 2, 2, 2],
    "offload": [1, 1, 1, 1],
}


def test_case_g1_every_policy_that_ships_is_in_the_table() -> None:
    assert list(SHIPPED) == list(LOSSLESS)


@pytest.mark.parametrize(("policy", "expected"), SHIPPED.items(), ids=SHIPPED.keys())
def test_case_g1_exact_numbers_of_forwards(policy: str, expected: list[int]) -> None:
    model = stack()
    session = attach(model, policy, recipe={"policy": {"trust": ["*"]}})
    for _ in range(2):
        Part.calls.clear()
        one_step(model, x())
        assert _calls(model, Attention) == _calls(model, MLP) == expected
    report = session.report().splitlines()
    assert [line.split()[2:5] for line in report[-5:-1]] == [
        [policy, "2", str(2 * (n - 1))] for n in expected
    ]
    session.detach()


def test_case_g1_evaluation_mode_with_gradients_is_managed_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checkpointing of transformers is silently off then."""
    model = stack()
    model[1].eval()
    model[2].eval()
    session = attach(model, "recompute", recipe={"policy": {"trust": ["*"]}})
    for _ in range(2):
        Part.calls.clear()
        one_step(model, x())
        assert _calls(model, Attention) == _calls(model, MLP) == [2] * 4
    said = [line for line in caplog.messages if "evaluation mode" in line]
    assert len(said) == 1
    assert said[0].startswith("unit '1': in evaluation mode while gradients are on")
    session.detach()


@pytest.mark.parametrize(
    ("units", "rules", "attention", "mlp"),
    [
        (["*.attention"], [{"match": "*", "action": "recompute"}], [2] * 4, [1] * 4),
        (["*.mlp"], [{"match": "*", "every": 2, "action": "recompute"}], [1] * 4, [2, 1, 2, 1]),
        ([], [{"match": "*", "every": 2, "action": "recompute"}], [2, 1, 2, 1], [2, 1, 2, 1]),
        ([], [{"match": "*", "last": 1, "action": "recompute"}], [1, 1, 1, 2], [1, 1, 1, 2]),
    ],
    ids=["attention only", "every other mlp", "every other", "the last"],
)
def test_case_g1_exact_numbers_of_forwards_by_rule(
    units: list[str], rules: list[Any], attention: list[int], mlp: list[int]
) -> None:
    model = stack()
    recipe = {"policy": {"start": "keep", "units": units, "rules": rules, "trust": ["*"]}}
    session = rematic.attach(model, recipe=recipe)
    one_step(model, x())
    assert (_calls(model, Attention), _calls(model, MLP)) == (attention, mlp)
    session.detach()


def test_case_g1_a_pattern_that_matches_nothing_is_an_error() -> None:
    for policy in ({"units": ["*.attn"]}, {"rules": [{"match": "*.attn", "action": "keep"}]}):
        with pytest.raises(ValueError, match=r"pattern '\*.attn' matches none of the"):
            rematic.attach(stack(), recipe={"policy": {"start": "recompute", **policy}})


GRANULARITY: dict[str, tuple[list[str], list[dict[str, Any]], list[str]]] = {
    "names": ([], [{"match": "1[01]"}], ["10", "11"]),
    "class": (["Attention"], [{"match": "Attention", "first": 2}], ["0.attention", "1.attention"]),
    "first two and last two": ([], [{"match": "*", "first": 2, "last": 2}], ["0", "1", "10", "11"]),
    "five of six": (
        [],
        [{"match": "*", "share": [5, 6]}],
        ["1", "2", "3", "4", "5", "7", "8", "9", "10", "11"],
    ),
    "range": ([], [{"match": "*", "span": [3, 6]}], ["3", "4", "5"]),
    "exclude": ([], [{"match": "*", "exclude": ["?", "10"]}], ["11"]),
    "overlap": (["*", "*.attention", "*.mlp.proj"], [{"match": "7"}], ["7"]),
    "patterns in another order": (
        ["*.mlp", "*.attention"],
        [{"match": "0.*"}],
        ["0.attention", "0.mlp"],
    ),
}


@pytest.mark.parametrize(
    ("units", "rules", "expected"), GRANULARITY.values(), ids=GRANULARITY.keys()
)
def test_case_g4_granularity(
    units: list[str], rules: list[dict[str, Any]], expected: list[str]
) -> None:
    model = stack(12)
    rules = [{**rule, "action": "recompute"} for rule in rules]
    recipe = {"policy": {"start": "keep", "units": units, "rules": rules}}
    session = rematic.attach(model, recipe=recipe)
    names = list(session._engine.classes)
    assert names == [n for n, _ in model.named_modules() if n in set(names)]  # the model's order
    assert not [n for n in names if any(n.startswith(f"{other}.") for other in names)]
    chosen = zip(names, session.plan.actions, strict=True)
    assert [name for name, action in chosen if action == Recompute()] == expected
    session.detach()


def _identity(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    names = {id(p): name for name, p in model.named_parameters()}
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [name for name, _ in model.named_parameters()],
        [(name, type(module)) for name, module in model.named_modules()],
        [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
    )


def _same(a: Any, b: Any) -> bool:
    return (
        list(a[0]) == list(b[0])
        and all(torch.equal(a[0][name], b[0][name]) for name in a[0])
        and a[1:] == b[1:]
    )


@pytest.mark.parametrize("policy", [*LOSSLESS, Tile(num_tiles=2), Compress()], ids=str)
def test_case_h1_names_types_and_files_are_those_of_the_untouched_model(
    policy: Any, tmp_path: Path
) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return get_peft_model(build_llama("sdpa"), config)

    if isinstance(policy, (Tile, Compress)):
        policy = rematic.Policy(name="mine", rules=(Rule(pattern="*", action=policy),))
    untouched, model = build(), build()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (untouched, model)]
    wanted = _identity(untouched, optimizers[0])
    session = attach(model, policy, optimizer=optimizers[1])
    with session.step(IDS):
        one_step(model, input_ids=IDS, labels=IDS)
    model.zero_grad()
    assert _same(_identity(model, optimizers[1]), wanted)
    session.switch("keep")
    session.rollback()
    assert _same(_identity(model, optimizers[1]), wanted)
    assert isinstance(model.base_model.model, type(untouched.base_model.model))
    adapters = get_peft_model_state_dict(model)
    assert list(adapters) == list(get_peft_model_state_dict(untouched))
    assert len(adapters) == 12
    for name, each in (("a", model), ("b", untouched)):
        each.save_pretrained(tmp_path / name)
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab"]
    assert saved[0].keys() == saved[1].keys()
    assert len(saved[0]) == 12
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    session.detach()
    untouched.load_state_dict(model.state_dict())


@pytest.mark.parametrize("when", ["in forward", "before backward", "between micro-batches"])
def test_case_h3_a_switch_waits_for_the_boundary(when: str) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, "keep", optimizer=optimizer, recipe={"policy": {"trust": ["*"]}})
    handle = model[1].register_forward_hook(
        lambda *_: session.switch("recompute") if when == "in forward" else None
    )
    replays = []
    for micro_batch in range(3):
        with session.step(x()):
            loss = model(x()).sum()
            handle.remove()
            if when == "before backward" and micro_batch == 0:
                session.switch("recompute")
            loss.backward()
        if when == "between micro-batches" and micro_batch == 0:
            session.switch("recompute")
        replays.append(session.last_step.replays)
        if micro_batch == 1:
            assert session.policy.name == "keep"
            optimizer.step()
            assert session.policy.name == "recompute"
    assert replays == [0, 0, 4]
    session.detach()


def test_case_h3_evaluation_and_generation_run_once() -> None:
    torch.manual_seed(0)
    model = build_llama("sdpa").eval()
    wanted = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    session = attach(model)
    with torch.no_grad():
        model(input_ids=IDS)
    found = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted)
    assert [unit.num_forwards for unit in session._engine.units] == [0, 0, 0]
    session.detach()


KINDS: dict[str, Callable[[], Action]] = {
    "keep": Keep,
    "selective": Selective,
    "recompute": Recompute,
    "offload": Offload,
}


@pytest.mark.parametrize("action", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("case", peculiar_arguments.CASES, ids=str)
def test_case_k1_call_signatures(case: Case, action: Callable[[], Action]) -> None:
    model = nn.Sequential(build(case))
    engine = Engine(model)
    engine.apply(Plan(actions=tuple(action() for _ in engine.units)))
    found = drive(case, model[0], lambda: None)
    assert differences(found, plain_outcome(case)) == []
    engine.detach()


def test_case_k1_outputs_keep_their_types() -> None:
    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        extra: dict[str, Any]

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, given: Output, *, scale: Any = None) -> Output:
            hidden = torch.tanh(self.proj(given.hidden)) * given.extra["by"]
            return Output(hidden, {"by": given.extra["by"], "scale": scale})

    model = nn.ModuleList([Returns(), Returns()])
    session = attach(nn.Sequential(model))
    output = Output(x(), {"by": torch.tensor(2.0, requires_grad=True)})
    for block in model:
        output = block(output, scale=None)
    output.hidden.sum().backward()
    assert type(output) is Output
    assert output.extra["scale"] is None
    assert all(p.grad is not None for p in model.parameters())
    session.detach()

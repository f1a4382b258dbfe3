"""What docs/migration.md says a setting becomes runs the same blocks as often, to the same bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils import checkpoint as stock

import rematic
from rematic.memory import SimulatedProbe
from tests.activations.families import build_llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text("utf-8")


class Calls:
    """Slots: what objects hold in their `__dict__` a replay puts back."""

    __slots__ = ("of_blocks",)


CALLS = Calls()


class Block(nn.Module):
    """Counts its forwards, replays too."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.of_blocks[self.position] += 1
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def one_step(model: nn.Module) -> tuple[list[int], dict[str, Tensor | None]]:
    """Returns the forwards of each block and the gradients."""
    CALLS.of_blocks = [0] * 4
    torch.manual_seed(3)
    model(torch.randn(3, 8)).sum().backward()
    names = (
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
    )
    gradients = dict(zip(names, (p.grad for p in model.parameters()), strict=True))
    return CALLS.of_blocks, gradients


def by_hand(model: Model) -> None:
    model.run = lambda block, x: stock.checkpoint(block, x, use_reentrant=False)


def every_other(model: Model) -> None:
    model.run = lambda block, x: (
        stock.checkpoint(block, x, use_reentrant=False) if block.position % 2 == 0 else block(x)
    )


def selective(model: Model) -> None:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def contexts() -> Any:
        return stock.create_selective_checkpoint_contexts(saved)

    model.run = lambda block, x: stock.checkpoint(
        block, x, use_reentrant=False, context_fn=contexts
    )


def in_wrappers(model: Model) -> None:
    wrappers.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))


def composed(model: Model) -> None:
    for block in model.blocks:
        composable(block)


def on_cpu(model: Model) -> None:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with save_on_cpu():
            return block(x)

    model.run = run


EVERY_OTHER = {
    "policy": {"start": "keep", "rules": [{"match": "*", "every": 2, "action": "recompute"}]}
}
NAMED_OPS = {
    "policy": {
        "start": "keep",
        "rules": [{"match": "*", "action": {"name": "selective", "save": ["matmul"]}}],
    }
}
HAND: dict[str, tuple[Callable[[Model], None], dict[str, Any]]] = {
    "checkpoint": (by_hand, {"policy": "recompute"}),
    "every other": (every_other, {"recipe": EVERY_OTHER}),
    "selective": (selective, {"policy": "selective"}),
    "selective by name": (selective, {"recipe": NAMED_OPS}),
    "checkpoint_wrapper": (in_wrappers, {"policy": "recompute"}),
    "composable": (composed, {"policy": "recompute"}),
    "save_on_cpu": (on_cpu, {"policy": "offload"}),
}


@pytest.mark.parametrize(("was", "options"), HAND.values(), ids=HAND.keys())
def test_by_hand(was: Callable[[Model], None], options: dict[str, Any]) -> None:
    old, new = Model(), Model()
    was(old)
    stays = in_wrappers if was is in_wrappers else composed if was is composed else None
    if stays is not None:  # taken over
        stays(new)
    options = dict(options)  # the table stays
    recipe = options.pop("recipe", {})
    trusting = {"policy": {**recipe.get("policy", {}), "trust": ["*"]}}
    session = rematic.attach(new, recipe=trusting, probe=SimulatedProbe(), budget="1GiB", **options)
    (runs, gradients), (expected, wanted) = one_step(new), one_step(old)
    assert runs == expected
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    session.detach()


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({}, {"policy": "recompute"}),
    "every_n_layers": ({"every_n_layers": 2}, {"recipe": EVERY_OTHER}),
    "offload": ({"offload": True}, {"policy": "recompute+offload"}),
}


def llama_step(model: nn.Module) -> tuple[int, list[Tensor]]:
    """Returns the floating point operations, replays included, and the gradients."""
    ids = torch.arange(14).view(2, 7) % 11
    torch.manual_seed(3)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("flags", "options"), FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "LoRA"])
def test_of_transformers(flags: dict[str, Any], options: dict[str, Any], adapters: bool) -> None:
    old, new = (build(adapters=adapters) for _ in range(2))
    # its offloading needs pinned memory, which a CPU has not; it changes no number
    old.activation_checkpointing_enable(**{k: v for k, v in flags.items() if k != "offload"})
    new.activation_checkpointing_enable(**flags)  # stays, and is taken over
    recipe = options.get("recipe", {})
    trusting = {"policy": {**recipe.get("policy", {}), "trust": ["*"]}}
    session = rematic.attach(
        new,
        recipe=trusting,
        policy=options.get("policy"),
        probe=SimulatedProbe(),
        budget="1GiB",
    )
    (flops, gradients), (expected, wanted) = llama_step(new), llama_step(old)
    assert flops == expected
    assert all(map(torch.equal, gradients, wanted))
    session.detach()


def build(*, adapters: bool) -> Any:
    torch.manual_seed(0)
    model = build_llama("eager", num_hidden_layers=4)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if adapters else model


def test_the_page_names_what_exists() -> None:
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        ast.parse(snippet)
    for name in set(re.findall(r"rematic\.(Recompute\w+|attach)", PAGE)):
        assert hasattr(rematic, name), name
    for name in set(re.findall(r'policy="([^"]+)"', PAGE)):
        session = rematic.attach(Model(), policy=name, probe=SimulatedProbe(), budget="1GiB")
        assert session.policy.name == name
        session.detach()

"""A fit with rematic is the fit without it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from rematic.memory import SimulatedProbe
from tests.hosts.lightning_fits import Net, Runner, ValidatedNet

ENTRIES = ("strategy", "name", "callback")
POLICIES = ("keep", "recompute", "planned")
ROOMY = "64GiB"


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    return {}


@pytest.fixture
def plain(runner: Runner, references: dict[Any, Any]) -> Callable[..., Any]:
    """Plain fits, each kind once; no checkpointing of any sort in them."""

    def plain(**options: Any) -> Any:
        key = tuple(sorted(options.items()))
        if key not in references:
            references[key] = runner.fit(**options)
        return references[key]

    return plain


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_recomputing_in_every_kind_of_fit(
    runner: Runner, plain: Any, accumulate: int, clip: float | None, precision: str
) -> None:
    options = {
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": clip,
        "precision": precision,
    }
    entry = runner.entry("strategy", policy="recompute", budget=ROOMY)
    fitted = runner.fit(**options, **entry)
    fitted.is_same_as(plain(**options))
    assert fitted.session.num_steps == 14


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_under_every_policy(
    runner: Runner, plain: Any, entry: str, policy: str
) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "precision": "fp32"}
    fitted = runner.fit(**options, **runner.entry(entry, policy=policy, budget=ROOMY))
    fitted.is_same_as(plain(**options))


@pytest.mark.parametrize("entry", ["strategy", "callback"])
@pytest.mark.parametrize(
    ("policy", "replays"), [("keep", 0), ("recompute", 14), ("planned", 1)], ids=POLICIES
)
def test_each_block_runs_once_and_is_replayed_where_planned(
    runner: Runner, entry: str, policy: str, replays: int
) -> None:
    fitted = runner.fit(**runner.entry(entry, policy=policy, budget=ROOMY))
    for block in fitted.module.blocks:
        assert block.calls.count(replays=False) == 14
        assert (
            block.calls.count(replays=True) == replays
        )  # `planned` knows nothing before its first step


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_tight_budget_is_kept_and_changes_nothing(runner: Runner, plain: Any, entry: str) -> None:
    with SimulatedProbe() as probe:
        free = runner.fit(**runner.entry(entry, policy="keep", budget=ROOMY, probe=probe))
    needed_bytes = free.session.last_step.predicted_peak_bytes
    with SimulatedProbe() as probe:
        tight = runner.fit(**runner.entry(entry, budget=needed_bytes, probe=probe))
    tight.is_same_as(plain())
    step = tight.session.last_step
    assert step.plan.get("recompute", 0) > 0
    assert step.peak_bytes < needed_bytes


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_validation_in_the_fit_runs_plain(runner: Runner, plain: Any, entry: str) -> None:
    options = {"module": ValidatedNet, "validation": True, "val_check_interval": 3}
    fitted = runner.fit(**options, **runner.entry(entry, policy="recompute", budget=ROOMY))
    fitted.is_same_as(plain(**options))
    assert fitted.session.num_steps == 14
    row = fitted.session.report().splitlines()[3]
    assert row.split()[:4] == ["blocks.0", "Block", "recompute", "14"]
    assert fitted.module.blocks[0].calls.count(replays=False) == 14 + 2 + 4 * 7


class TwoOptimizers(pl.LightningModule):
    """Two backwards and two optimizers in each manual step, accumulating over three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Net(), Net()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        optimizers = self.optimizers()
        shared = self.first(x)
        losses = [((shared - y) ** 2).mean(), (self.second(x) - shared.detach()).abs().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            self.manual_backward(loss / 3)
            self.losses.append(loss.item())
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return {"losses": [loss.detach() for loss in losses]}

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), 1e-2) for net in (self.first, self.second)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_manual_optimization(
    runner: Runner, plain: Any, entry: str, policy: str, precision: str
) -> None:
    options = {"module": TwoOptimizers, "precision": precision}
    fitted = runner.fit(**options, **runner.entry(entry, policy=policy, budget=ROOMY))
    fitted.is_same_as(plain(**options))
    assert fitted.session.num_steps == 14  # one step covers both backwards


class SwitchesOnce(TwoOptimizers):
    """Asks for another policy in the middle of an accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        session = self.trainer.strategy.session
        if (self.current_epoch, batch_idx) == (0, 1):
            session.switch("keep")
        output = super().training_step(batch, batch_idx)
        self.policies.append(session.policy.name)
        return output


def test_a_switch_waits_for_the_optimizer(runner: Runner, plain: Any) -> None:
    """Case L1; that a retry restores only the micro-batch that failed is in the recovery tests."""
    fitted = runner.fit(SwitchesOnce, **runner.entry("strategy", policy="recompute", budget=ROOMY))
    fitted.is_same_as(plain(module=TwoOptimizers, precision="fp32"))
    assert fitted.module.policies[:4] == ["recompute", "recompute", "keep", "keep"]

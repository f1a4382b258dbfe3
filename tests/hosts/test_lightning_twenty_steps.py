"""Twenty steps of a fit on one device, by every strategy that can, against no checkpointing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

import rematic
from rematic.recipes import PolicyConfig, Recipe
from tests.hosts.lightning_fits import Fitted, Runner

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
ROOMY = "64GiB"
TRUSTING = Recipe(policy=PolicyConfig(trust=("*",)))
OURS: dict[str, Callable[..., Strategy]] = {
    "one device": rematic.RecomputeStrategy,
    "ddp": lambda **kw: rematic.RecomputeDDPStrategy(process_group_backend="gloo", **kw),
}
STOCK: dict[str, Callable[[], Any]] = {
    "one device": lambda: "auto",
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
}


def twenty(runner: Runner, strategy: Any, **options: Any) -> Fitted:
    return runner.fit(max_epochs=20, max_steps=20, strategy=strategy, **options)


@pytest.mark.parametrize(("accumulate", "policy"), [(1, "recompute"), (4, "planned")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", OURS)
def test_weights_after_twenty_steps(
    runner: Runner, kind: str, precision: str, accumulate: int, policy: str
) -> None:
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    plain = twenty(runner, STOCK[kind](), **options)
    strategy = OURS[kind](recipe=TRUSTING, policy=policy, budget=ROOMY)
    fitted = twenty(runner, strategy, **options)
    fitted.is_same_as(plain)
    assert fitted.trainer.global_step == 20
    assert strategy.session.num_steps >= 20 * accumulate * 0.8  # the last of an epoch are fewer


@pytest.mark.parametrize("kind", OURS)
def test_checkpoints_go_both_ways_without_a_warning(
    runner: Runner, tmp_path: Path, kind: str
) -> None:
    """And load under `weights_only`, which torch and Lightning take where nothing is said."""

    def ours() -> Strategy:
        return OURS[kind](recipe=TRUSTING, policy="recompute", budget=ROOMY)

    makers = {"ours": ours, "stock": STOCK[kind]}
    for name, make in makers.items():
        first = runner.fit(max_epochs=1, strategy=make())
        first.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    fitted = []
    for saved in makers:
        torch.load(tmp_path / f"{saved}.ckpt", weights_only=True)
        for make in makers.values():
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*weights_only.*|.*rematic.*")
                path = tmp_path / f"{saved}.ckpt"
                fitted.append(runner.fit(max_epochs=2, ckpt_path=path, seed=11, strategy=make()))
    for other in fitted[1:]:
        other.is_same_as(fitted[0])

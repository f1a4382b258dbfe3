"""The strategies and the callback from the arguments and the YAML files of a LightningCLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import rematic
import rematic.callbacks
from tests.hosts.lightning_fits import Net, loader_of_batches

pytestmark = pytest.mark.filterwarnings(
    "ignore:LightningCLI's args parameter is intended to run from within Python",
    # Lightning 2.6 calls jsonargparse in ways that its newest releases deprecate.
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",
)
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
RANKED = {
    "RecomputeDDPStrategy": ("process_group_backend", "gloo"),
    "RecomputeFSDPStrategy": ("sharding_strategy", "SHARD_GRAD_OP"),
    "RecomputeModelParallelStrategy": ("save_distributed_checkpoint", "false"),
}


class Fed(Net):
    """A module that brings its data."""

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return loader_of_batches()


def run(args: Any, *, fits: bool = True) -> LightningCLI:
    argv = ["fit", *args] if fits else args
    return LightningCLI(
        Fed,
        run=fits,
        trainer_defaults=QUIET,
        save_config_callback=None,
        seed_everything_default=7,
        args=argv,
    )


def test_the_strategy_by_arguments() -> None:
    strategy = ("--trainer.strategy", "rematic.RecomputeStrategy")
    budget = ("--trainer.strategy.budget", "20GiB")
    policy = ("--trainer.strategy.policy", "recompute")
    plain = run([])
    cli = run([*strategy, *budget, *policy])
    session = cli.trainer.strategy.session
    assert session.num_steps == 7
    assert session.budget_bytes == 20 << 30
    for one, other in zip(cli.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", RANKED)
def test_strategies_for_several_devices(name: str) -> None:
    argument, value = RANKED[name]
    args = ["--trainer.strategy", f"rematic.{name}", "--trainer.strategy.recipe", "auto"]
    args += ["--trainer.strategy.budget", "0.5", f"--trainer.strategy.{argument}", value]
    strategy = run(args, fits=False).trainer.strategy
    assert type(strategy) is getattr(rematic, name)
    assert strategy._driver._attach.keywords["budget"] == 0.5
    assert str(getattr(strategy, f"_{argument}", getattr(strategy, argument, None))) in (
        "gloo",
        "ShardingStrategy.SHARD_GRAD_OP",
        "False",
    )


@pytest.mark.parametrize(
    "lines",
    [
        "strategy: {class_path: rematic.RecomputeStrategy, init_args: {policy: recompute}}",
        "callbacks: [{class_path: rematic.callbacks.AdaptiveRecompute, "
        "init_args: {policy: recompute}}]",
    ],
    ids=["strategy", "callback"],
)
def test_a_yaml_file(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "fit.yaml"
    path.write_text(f"trainer:\n  {lines}\n", "utf-8")
    trainer = run(["--config", str(path)]).trainer
    callbacks = [c for c in trainer.callbacks if hasattr(c, "session")]
    assert (callbacks or [trainer.strategy])[0].session.num_steps == 7

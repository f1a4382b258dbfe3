"""The strategies for several devices: parity on two ranks over gloo, and what they refuse."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch import nn

import rematic
import rematic.callbacks
from tests.hosts.lightning_fits import Runner
from tests.ranks import run_ranks

KINDS = ("ddp", "ddp accumulating", "ddp failing", "fsdp2", "fsdp2 accumulating", "fsdp")
NAMES = {
    "recompute_ddp": "RecomputeDDPStrategy",
    "recompute_fsdp": "RecomputeFSDPStrategy",
    "recompute_fsdp2": "RecomputeModelParallelStrategy",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks printed, by kind of fit."""
    os.environ["CHECKPOINTS"] = str(tmp_path_factory.mktemp("checkpoints"))
    outputs = run_ranks("tests.hosts.lightning_ranks", seconds=240)
    lines = [[json.loads(x) for x in o.splitlines() if x.startswith("{")] for o in outputs]
    return [{line["kind"]: line for line in of_rank} for of_rank in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_different_policies_end_as_the_plain_fit(ranks: Any, kind: str) -> None:
    keeps, recomputes = (rank[kind] for rank in ranks)
    for rank in (keeps, recomputes):
        assert rank["same"]
        assert rank["same_generator"]
        assert rank["micro_batches"] == 6
        assert rank["classes"] == ["Block"]
        assert rank["left"] == rank["pending"] == 0
    assert keeps["sum"] == recomputes["sum"]
    assert keeps["plan"] == {"keep": 3}
    assert keeps["replays"] == [0, 0, 0]
    assert recomputes["plan"] == {"recompute": 3}
    assert recomputes["replays"] == [6, 6, 6]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_switch_of_one_rank_comes_on_both_after_the_optimizer(ranks: Any, kind: str) -> None:
    one, other = (rank[f"{kind} switched"] for rank in ranks)
    assert one["same"]
    assert other["same"]
    assert one["policies"] == other["policies"]
    assert one["policies"][:4] == ["keep"] * 4
    assert one["policies"][-1] == "recompute"
    since = one["policies"].index("recompute")
    assert since % 2 == 1, "between the micro-batches of one update"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_checkpoints_of_ranks_go_both_ways(ranks: Any, kind: str) -> None:
    for rank in ranks:
        line = rank[f"{kind} checkpoints"]
        assert line["same"] == ["plain to ours", "ours to plain", "ours to ours"]
        assert line["steps"] == {"plain": 6, "ours": 12}


def test_what_is_sharded_inside_a_unit_is_refused(ranks: Any) -> None:
    for rank in ranks:
        error = rank["inside"]["error"]
        assert error.startswith("body.blocks.0.linear is sharded by itself inside the unit body.bl")
        assert "Shard body.blocks.0 by fully_shard" in error


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_name(name: str) -> None:
    strategy = getattr(rematic, NAMES[name])
    assert StrategyRegistry[name]["strategy"] is strategy
    assert type(StrategyRegistry.get(name)) is strategy


def test_what_the_strategies_below_take_is_taken() -> None:
    ddp = rematic.RecomputeDDPStrategy(
        "auto", "20GiB", find_unused_parameters=True, process_group_backend="gloo"
    )
    assert ddp._ddp_kwargs == {"find_unused_parameters": True}
    assert ddp.process_group_backend == "gloo"
    fsdp = rematic.RecomputeFSDPStrategy(budget="20GiB", sharding_strategy="SHARD_GRAD_OP")
    assert fsdp.sharding_strategy.name == "SHARD_GRAD_OP"
    sharded = rematic.RecomputeModelParallelStrategy(save_distributed_checkpoint=False)
    assert not sharded._save_distributed_checkpoint


def test_the_checkpointing_of_fsdp_is_taken_over() -> None:
    with pytest.warns(UserWarning, match="takes activation checkpointing over: its recipe decides"):
        strategy = rematic.RecomputeFSDPStrategy(activation_checkpointing_policy={nn.Linear})
    assert not strategy._activation_checkpointing_kwargs


def test_tensor_parallel_units_are_recomputed_on_all_ranks(ranks: Any) -> None:
    for rank in (rank["tensor"] for rank in ranks):
        assert rank["same"]
        assert rank["same_generator"]
        assert rank["replays"] == [5, 5, 5]  # the first call shows that there are collectives
    assert ranks[0]["tensor"]["sum"] == ranks[1]["tensor"]["sum"]


@pytest.mark.parametrize("name", NAMES)
def test_beside_the_callback_each_is_refused(runner: Runner, name: str) -> None:
    callback = rematic.callbacks.AdaptiveRecompute(policy="keep")
    trainer = runner.trainer(strategy=name, callbacks=[callback])
    with pytest.raises(ValueError, match=f"with {NAMES[name]}: expected one of the two"):
        callback.setup(trainer, trainer.lightning_module, "fit")


class FSDPOnCPU(FSDPStrategy):
    """Not of the type that Lightning refuses on a CPU."""


def test_the_callback_over_fsdp_is_refused_with_what_to_use(runner: Runner) -> None:
    callback = rematic.callbacks.AdaptiveRecompute(policy="keep")
    trainer = runner.trainer(strategy=FSDPOnCPU(), callbacks=[callback])
    with pytest.raises(
        ValueError, match=r"before a callback can attach to them: expected rematic\.R"
    ):
        callback.setup(trainer, trainer.lightning_module, "fit")

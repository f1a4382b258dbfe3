"""Fits on two ranks over gloo, plain and with rematic: run by `test_lightning_ranks.py`.

Prints one line of JSON for each kind of fit: what is the same as in the plain one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import rematic
from rematic.recipes import PolicyConfig, Recipe

WIDTH = 16
NUM_BATCHES = 6
TRUSTING = Recipe(policy=PolicyConfig(trust=("*",)))
Make = Callable[..., Strategy]
PENDING: list[int] = []
"""Batches that will run out of memory; outside the module, whose state a retry puts back."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Net(pl.LightningModule):
    """A module that can shard itself."""

    def __init__(self, *, shards: str = "") -> None:
        super().__init__()
        self.body = Body()
        self.shards = shards

    def configure_model(self) -> None:
        if not self.shards:
            return
        if self.shards == "tensor":
            for block in self.body.blocks:
                parallelize_module(
                    block.linear,
                    self.device_mesh["tensor_parallel"],
                    ColwiseParallel(output_layouts=Replicate()),
                )
            self.shards = ""
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.body.blocks:
            fully_shard(block.linear if self.shards == "inside" else block, mesh=mesh)
        fully_shard(self.body, mesh=mesh)
        self.shards = ""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.body(batch) ** 2).mean()
        if batch_idx in PENDING:
            PENDING.remove(batch_idx)
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class FSDPOnCPU(FSDPStrategy):
    """Not of the type that Lightning refuses on a CPU."""


def fit(strategy: Strategy, rank: int, **options: Any) -> tuple[Net, pl.Trainer]:
    accumulate, epochs = options.pop("accumulate", 1), options.pop("epochs", 1)
    callbacks, path = options.pop("callbacks", []), options.pop("ckpt_path", None)
    torch.manual_seed(0)
    module = Net(**options)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(tempfile.gettempdir()),
    )
    if options.get("shards") == "tensor":
        rank = 0  # ranks of one tensor share their data
    torch.manual_seed(10 + rank)
    batches = [torch.randn(2 + i + 3 * rank, WIDTH) for i in range(NUM_BATCHES)]
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
    return module, trainer


def weights(module: Net, trainer: pl.Trainer) -> dict[str, Tensor]:
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {n: p.detach().clone() for n, p in module.named_parameters()}
    found = module.named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in found}


def compare(
    name: str,
    plain: Make,
    ours: Make,
    rank: int,
    *,
    policies: tuple[str, str] = ("keep", "recompute"),
    fails: tuple[int, ...] = (),
    **options: Any,
) -> None:
    """One plain fit, and one in which the ranks have different policies."""
    wanted = weights(*fit(plain(process_group_backend="gloo"), rank, **options))
    generator = torch.get_rng_state()
    strategy = ours(recipe=TRUSTING, policy=policies[rank], process_group_backend="gloo")
    PENDING.extend(fails)
    module, trainer = fit(strategy, rank, **options)
    found = weights(module, trainer)
    session = strategy.session
    line = {
        "kind": name,
        "same": found.keys() == wanted.keys()
        and all(torch.equal(found[key], wanted[key]) for key in wanted),
        "same_generator": torch.equal(generator, torch.get_rng_state()),
        "classes": sorted(set(session.unit_classes.values())),
        "plan": session.last_step.plan,
        "micro_batches": session.num_steps,
        "replays": [int(row.split()[4]) for row in session.report().splitlines()[3:6]],
        "sum": float(sum(w.double().sum() for w in found.values())),
        "left": sum("forward" in vars(m) for m in module.body.modules()),
        "pending": len(PENDING),
    }
    print(json.dumps(line), flush=True)


class AsksOnce(pl.Callback):
    """Asks for another policy on one rank, in the middle of an accumulation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.policies: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        session = trainer.strategy.session
        if session.num_steps == 3 and self.rank == 1:
            session.switch("recompute")
        self.policies.append(session.policy.name)


def switched(name: str, plain: Make, ours: Make, rank: int, **options: Any) -> None:
    """A fit in which one rank asks for a switch, against a plain one."""
    options |= {"accumulate": 2, "epochs": 3}
    wanted = weights(*fit(plain(process_group_backend="gloo"), rank, **options))
    strategy = ours(recipe=TRUSTING, policy="keep", process_group_backend="gloo")
    asking = AsksOnce(rank)
    found = weights(*fit(strategy, rank, callbacks=[asking], **options))
    same = all(torch.equal(found[key], wanted[key]) for key in wanted)
    print(json.dumps({"kind": name, "same": same, "policies": asking.policies}), flush=True)


def checkpoints(name: str, plain: Make, ours: Make, rank: int, **options: Any) -> None:
    """Saves by both and resumes by both, each in a folder of all ranks."""

    def make(which: str) -> Strategy:
        if which == "plain":
            return plain(process_group_backend="gloo")
        return ours(recipe=TRUSTING, policy="recompute", process_group_backend="gloo")

    ends: dict[str, dict[str, Tensor]] = {}
    steps = {}
    for saves in ("plain", "ours"):
        _, trainer = fit(make(saves), rank, **options)
        path = Path(os.environ["CHECKPOINTS"], f"{name} {saves}".replace(" ", "-"))
        trainer.save_checkpoint(path)
        for loads in ("plain", "ours"):
            strategy = make(loads)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*weights_only.*|.*rematic.*")
                pair = fit(strategy, rank, epochs=2, ckpt_path=path, **options)
            ends[f"{saves} to {loads}"] = weights(*pair)
            if loads == "ours":
                steps[saves] = strategy.session.num_steps
    first = ends.pop("plain to plain")
    same = [pair for pair, end in ends.items() if all(torch.equal(end[k], first[k]) for k in first)]
    print(json.dumps({"kind": name, "same": same, "steps": steps}), flush=True)


def refused(name: str, strategy: Strategy, rank: int, **options: Any) -> None:
    try:
        fit(strategy, rank, **options)
    except ValueError as error:
        print(json.dumps({"kind": name, "error": str(error)}), flush=True)


def let_fsdp_run_on_a_cpu() -> None:
    plain = FullyShardedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = init


def main(port: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    ddp = DDPStrategy, rematic.RecomputeDDPStrategy
    compare("ddp", *ddp, rank)
    compare("ddp accumulating", *ddp, rank, accumulate=2)
    compare("ddp failing", *ddp, rank, fails=(1, 4) if rank == 1 else ())

    def two(**kwargs: Any) -> Strategy:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **kwargs)

    ours = rematic.RecomputeModelParallelStrategy
    compare("fsdp2", two, ours, rank, shards="blocks")
    compare("fsdp2 accumulating", two, ours, rank, shards="blocks", accumulate=2)
    switched("ddp switched", *ddp, rank)
    switched("fsdp2 switched", two, ours, rank, shards="blocks")
    checkpoints("ddp checkpoints", *ddp, rank)
    checkpoints("fsdp2 checkpoints", two, ours, rank, shards="blocks")
    refused(
        "inside",
        ours(policy="recompute", process_group_backend="gloo"),
        rank,
        shards="inside",
    )

    def parts(kind: Make) -> Make:
        return lambda **kw: kind(data_parallel_size=1, tensor_parallel_size=2, **kw)

    same = ("recompute", "recompute")
    tensor = parts(ModelParallelStrategy), parts(ours)
    compare("tensor", *tensor, rank, policies=same, shards="tensor")
    let_fsdp_run_on_a_cpu()
    compare(
        "fsdp",
        lambda **kwargs: FSDPOnCPU(auto_wrap_policy={Block}, **kwargs),
        lambda **kwargs: rematic.RecomputeFSDPStrategy(auto_wrap_policy={Block}, **kwargs),
        rank,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

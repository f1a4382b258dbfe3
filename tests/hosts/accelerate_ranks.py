"""Two ranks of an Accelerator under DDP and FSDP2, run by `test_accelerate_ranks.py`.

Accelerate refuses FSDP on a CPU; its state is set by hand, which is all that it takes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from tests.hosts.accelerate_loops import plugin_for

NUM_STEPS = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def prepared(*, sharded: bool, checkpointed: bool, accumulate: int = 1) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if sharded:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            activation_checkpointing=checkpointed,
            cpu_ram_efficient_loading=False,
        )
    return accelerator


def train(
    policy: str | None, *, sharded: bool, checkpointed: bool = False, asks: str | None = None
) -> list[Any]:
    """Returns losses and weights; with a policy also checks that it was carried out.

    Args:
        policy: The policy, None to train without rematic.
        sharded: By FSDP2 instead of DDP.
        checkpointed: Whether Accelerate is told to checkpoint.
        asks: A policy that the second rank asks for, alone, after its first step.
    """
    accelerator = prepared(sharded=sharded, checkpointed=checkpointed)
    plugin = plugin_for(policy=policy, recipe="auto", enabled=policy is not None)
    plugin.attach(accelerator)
    torch.manual_seed(0)
    raw = nn.Sequential(*[Block() for _ in range(3)])
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), 1e-2))

    @plugin.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        return loss.detach()

    torch.manual_seed(10 + accelerator.process_index)
    found: list[torch.Tensor] = []
    last = asks or policy
    for _ in range(NUM_STEPS):
        found.append(step(torch.randn(8, 16)))
        optimizer.step()
        optimizer.zero_grad()
        if asks is not None and accelerator.process_index == 1:
            assert plugin.session is not None
            plugin.session.switch(asks)
            asks = None
    if plugin.session is not None:
        record = plugin.session.last_step
        assert record is not None
        assert record.plan == {last: 3}
        assert record.replays == (3 if last == "recompute" else 0)
        plugin.detach()
        assert not any("forward" in module.__dict__ for module in raw.modules())
    weights = model.state_dict().values()
    return found + [w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for w in weights]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def main(port: str, rank: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    for sharded in (False, True):
        plain = train(None, sharded=sharded)
        for policy in ("recompute", "offload"):
            found = train(policy, sharded=sharded, checkpointed=sharded)
            assert same(found, plain), (sharded, policy)
        found = train("keep", sharded=sharded, checkpointed=sharded, asks="recompute")
        assert same(found, plain), sharded
    stock = train(None, sharded=True, checkpointed=True)
    print("equal, stock wrapper", "equal" if same(stock, plain) else "not")
    from tests.hosts.accelerate_rank_faults import stops  # which imports this file

    stops(int(rank), sharded=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

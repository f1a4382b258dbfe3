"""Two ranks under DDP over units without a graph: run by `test_graphless_ranks.py`."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rematic.activations import Engine
from rematic.policy import Plan, Recompute
from tests.activations.hidden import ids, make

NUM_STEPS = 3


def gradients(rank: int, *, attached: bool, tied: bool, unused: bool) -> list[torch.Tensor]:
    model = make(tied=tied)
    inner = model
    if attached:
        engine = Engine(inner)
        engine.apply(Plan(actions=tuple(Recompute() for _ in engine.units)))
    wrapped = DistributedDataParallel(inner, find_unused_parameters=unused)
    torch.manual_seed(100 + rank)
    for step in range(NUM_STEPS):
        wrapped.zero_grad()
        wrapped(ids(10 * step + rank)).backward()  # other data on each rank
    if attached:
        assert all(unit.graphless for unit in engine.units)
        assert engine.ledger.counts.replays.total() == 3 * NUM_STEPS
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def main(port: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for options in ({"tied": False, "unused": False}, {"tied": True, "unused": True}):
        wanted = gradients(rank, attached=False, **options)
        found = gradients(rank, attached=True, **options)
        assert all(map(torch.equal, found, wanted)), options
        others = [torch.empty_like(found[0]) for _ in range(2)]
        dist.all_gather(others, found[0])
        assert torch.equal(*others)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

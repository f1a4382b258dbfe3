"""Units whose forward has collectives, on two ranks: run by `test_collectives.py`."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rematic
from rematic.recipes import PolicyConfig, Recipe

WIDTH = 8
NUM_STEPS = 4
SEEN: list[str] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Exchanging(Block):
    """Takes the mean over ranks of what it computes, as a synchronised norm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * collectives.all_reduce(self.up(x).mean()) / 2


class Failing(Exchanging):
    """Finds no memory on one rank, after the ranks have exchanged what they do."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return y


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.at_block: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.at_block()
        return x + 0.0


class Collectives(TorchDispatchMode):
    """Takes down the collectives in their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            SEEN.append(func._opname)
        return func(*args, **(kwargs or {}))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = Net(Block)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded_inside(mesh: DeviceMesh) -> nn.Module:
    model = Net(Block)
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped_inside(mesh: DeviceMesh) -> nn.Module:
    model = Net(Block)
    for block in model.blocks:
        block.up = wrapped(block.up)
    return wrapped(model)


def wrapped(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


MODELS = {
    "tensor parallel": tensor_parallel,
    "sharded inside": sharded_inside,
    "wrapped inside": wrapped_inside,
    "exchanging": lambda mesh: Net(Exchanging),
}


def train(kind: str, mesh: DeviceMesh, rank: int, options: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(0)
    model = MODELS[kind](mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    net = getattr(model, "module", model)
    session = None if options is None else rematic.attach(net, optimizer, **options)
    if session is not None and rank == 1:
        net.at_block = lambda: session.evict(1 << 30)
    torch.manual_seed(7 if kind == "tensor parallel" else rank)  # its ranks share their data
    found = []
    for _ in range(NUM_STEPS):
        x = torch.randn(4, WIDTH)
        with contextlib.nullcontext() if session is None else session.step(x):
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]
    if session is not None:
        report = session.last_step
        assert report is not None
        evictions = session._engine.ledger.counts.num_evictions
        joint = len(session._engine.joint_units())
        print(f"ran {kind}, {options['policy']}: {report.replays} {evictions} {joint}")
        session.detach()
    return found


def run_out_of_memory(rank: int) -> None:
    """In a unit that would hang if it ran again on this rank alone."""
    model = Net(Failing)
    session = rematic.attach(model, policy="keep")

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    session.run(step, torch.randn(4, WIDTH))
    model.blocks[1].fails = rank == 1
    start = time.monotonic()
    try:
        session.run(step, torch.randn(4, WIDTH))
    except RuntimeError as error:
        said = "exchanges tensors with other ranks" in str(error)
        print(f"stopped: {said} {time.monotonic() - start < 20}")


def main(port: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    recipe = Recipe(policy=PolicyConfig(trust=("*",)))
    tries: list[dict[str, Any]] = [
        {"policy": "recompute"},
        {"policy": "selective"},
        {"policy": "planned", "budget": ("1GiB", "64GiB")[rank], "recipe": recipe},
    ]
    for kind in MODELS:
        SEEN.clear()
        with Collectives():
            plain = train(kind, mesh, rank, None)
        print(f"collectives of {kind}, plain: {len(SEEN)}")
        for options in tries:
            SEEN.clear()
            with Collectives():
                found = train(kind, mesh, rank, options)
            assert all(map(torch.equal, found, plain)), (kind, options)
            print(f"collectives of {kind}, {options['policy']}: {len(SEEN)}")
            orders: list[Any] = [None, None]
            dist.all_gather_object(orders, list(SEEN))
            assert orders[0] == orders[1] != [], (kind, options)
    print("equal")
    run_out_of_memory(rank)  # which leaves the process group


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

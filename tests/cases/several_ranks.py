"""Cases B1, B2, C4 and E3 on two ranks over gloo: run by `test_several_ranks.py`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rematic

WIDTH = 8
POLICIES = ("keep", "selective", "recompute", "recompute+offload", "offload", "planned")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Runs its blocks `times` over, beside a trainable layer that nothing uses."""

    def __init__(self, *, times: int = 1, unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.times = times
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x + 0.0


def gradients(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    rank: int,
    *,
    policy: str | None,
    steps: int = 4,
) -> list[torch.Tensor]:
    """The gradients of every step, of different data on each rank."""
    torch.manual_seed(0)
    model = make()
    session = None
    if policy is not None:
        session = rematic.attach(model, policy=policy, budget="64GiB")
    wrapped = wrap(model)
    torch.manual_seed(40 + rank)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        wrapped.zero_grad()
        x = torch.randn(3 + rank, WIDTH)
        with contextlib.nullcontext() if session is None else session.step(x):
            wrapped(x).square().mean().backward()
        held = [p.grad for p in model.parameters() if p.grad is not None]
        found += [getattr(g, "to_local", lambda g=g: g)().clone() for g in held]
    if session is not None:
        session.detach()
    return found


def mean_over_ranks(make: Callable[[], nn.Module], rank: int) -> list[torch.Tensor]:
    """What the gradients must be: the mean of what every rank has alone."""
    found = gradients(make, lambda model: model, rank, policy=None)
    for gradient in found:
        dist.all_reduce(gradient)
    return [gradient / 2 for gradient in found]


def case_b(name: str, rank: int, **options: Any) -> None:
    def make() -> nn.Module:
        return Net(**options)

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=options.get("unused", False))

    wanted, plain = mean_over_ranks(make, rank), gradients(make, wrap, rank, policy=None)
    for policy in POLICIES:
        found = gradients(make, wrap, rank, policy=policy)
        used = [g for g in found if g.abs().sum() > 0]  # DDP gives what is unused zeros
        assert len(used) == len(wanted) > 0, (name, policy)
        assert all(map(torch.equal, found, plain)), (name, policy)
        assert all(torch.allclose(a, b) for a, b in zip(used, wanted, strict=True)), (name, policy)
    print(f"{name}: as the mean of the ranks")


def sharded(mesh: DeviceMesh, *, inside: bool, half: bool) -> Callable[[nn.Module], nn.Module]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if half else {}

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            parts = (block.up, block.down) if inside else (block,)
            for part in parts:
                fully_shard(part, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrap


def case_c4(mesh: DeviceMesh, rank: int) -> None:
    """Inputs are cast in the replay as they were in forward, whoever shards whom."""
    for inside in (False, True):
        wrap = sharded(mesh, inside=inside, half=True)
        plain = gradients(Net, wrap, rank, policy=None)
        for policy in POLICIES:
            found = gradients(Net, wrap, rank, policy=policy)
            assert all(map(torch.equal, found, plain)), (inside, policy)
    print("C4: both orders")


def case_e3(mesh: DeviceMesh) -> None:
    """After backward everything is sharded, and nothing is left of old gradients."""
    torch.manual_seed(0)
    model = sharded(mesh, inside=False, half=False)(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = rematic.attach(model, optimizer, policy="keep", budget="64GiB")
    for policy in POLICIES:
        session.switch(policy)
        seen = {session.policy.name}
        for _ in range(8):
            with session.step(torch.ones(2, WIDTH)):
                model(torch.ones(2, WIDTH)).square().mean().backward()
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor), policy
                assert parameter.to_local().numel() == parameter.numel() // 2, policy
                assert isinstance(parameter.grad, DTensor), policy
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters()), policy
            seen.add(session.policy.name)
        assert policy in seen
    session.detach()
    print("E3: sharded and without old gradients")


def main(port: str, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    case_b("B1", rank, unused=True)
    case_b("B2", rank, times=2)
    case_c4(mesh, rank)
    case_e3(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

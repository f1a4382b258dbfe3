"""Trains on 2 and 4 ranks over gloo, plainly and with rematic, and compares the two bit by bit.

Every rank has its own data, lengths that differ from rank to rank, and dropout. One rank evicts in
the middle of its steps, another never does; in turns single ranks, and once all, ask for a switch,
a rollback or a pin, while the trainings go on. Per kind of training it is looked at whether losses,
weights, buffers and generators have the bits of the plain run, whether all ranks end with the same
weights, whether each step has the same collectives in the same order, and whether every policy came
into force on all ranks in the same step. A rank that is silent for a minute counts as a hang.

    .venv/bin/python benchmarks/rank_parity.py --json

Ten minutes on two cores; the tests run some short ones (tests/test_rank_parity.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the blocks are those of the tests

import rematic
from rematic.recipes import PolicyConfig, Recipe
from tests.step_models import WIDTH, Block

WATCHDOG_SECONDS = 60
TRUSTING = Recipe(policy=PolicyConfig(trust=("*",)))


class Net(nn.Module):
    """Blocks between two layers; tells a function which block it is at."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.at_block: Callable[[int], object] = lambda position: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch, seq, WIDTH)` to `(batch, seq, 2)`."""
        x = self.inp(x)
        for position, block in enumerate(self.blocks):
            x = block(x)
            self.at_block(position)
        return self.head(x) + 0.0  # FSDP warns of views


def _ddp(model: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)


def _fsdp1(model: Net) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def _fsdp2(model: Net, *, groups: int = 1, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = (groups, dist.get_world_size() // groups), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh if groups > 1 else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _half(model: Net) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for block in model.blocks:  # whose buffers the policy leaves in fp32, which its norm refuses
        block.batch_norm = nn.Identity()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp2(model, mp_policy=precision)


def _offloading(model: Net) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "ddp": _ddp,
    "ddp-bf16": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2-bf16": _half,
    "fsdp2-cpu-offload": _offloading,
    "hsdp": lambda model: _fsdp2(model, groups=2),
}
"""How a model becomes one of several ranks; `-bf16` of DDP is autocast, of FSDP2 its own policy."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One training to compare."""

    wrapper: str
    num_ranks: int
    accumulate: int = 1
    num_steps: int = 200
    """Optimizer steps."""


def all_kinds(num_steps: int) -> list[Kind]:
    """Returns what is run: every wrapper on 2 and 4 ranks, accumulating or not."""
    return [
        Kind(wrapper=wrapper, num_ranks=ranks, accumulate=accumulate, num_steps=num_steps)
        for ranks in (2, 4)
        for wrapper in WRAPPERS
        for accumulate in (1, 4)
        if wrapper != "hsdp" or ranks == 4
    ]


class _Collectives(TorchDispatchMode):
    """Takes down the collectives of each step: what, and how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch's
        types: Any,  # noqa: ANN401 - as torch's
        args: Any = (),  # noqa: ANN401 - as torch's
        kwargs: Any = None,  # noqa: ANN401 - as torch's
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.steps[-1].append(f"{func.__name__} {_bytes_of(args)}")
        return func(*args, **(kwargs or {}))


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def _asks(session: rematic.Session, step: int, kind: Kind) -> None:
    """Asks for a change where the plan of the run says so; on one rank, but for one on all."""
    rank, last = dist.get_rank(), kind.num_ranks - 1
    asking: tuple[tuple[int, Callable[[], None]], ...] = (
        (0, lambda: session.switch("recompute")),
        (last, lambda: session.switch("selective")),
        (0, lambda: session.rollback()),
        (last, lambda: session.pin("recompute+offload")),
        (0, lambda: session.unpin()),
        (-1, lambda: session.rollback()),
    )
    number, rest = divmod(step, max(7, kind.num_steps // 12))
    who, ask = asking[number % len(asking)]
    if rest == 0 and who in (rank, -1):
        ask()


def train(kind: Kind, *, ours: bool) -> dict[str, Any]:
    """Trains, and returns what must be the same as in the plain run, and what it looked like."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    session = rematic.attach(model, policy="keep", recipe=TRUSTING) if ours else None
    wrapped = WRAPPERS[kind.wrapper](model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    if session is not None:
        session.read_parameters()
        session.add_optimizers(optimizer)
        if rank == 1:
            model.at_block = lambda position: position and session.evict(1 << 30)
    torch.manual_seed(40 + rank)
    data = torch.Generator().manual_seed(rank)
    losses, policies = [], []
    with _Collectives() as collectives:
        for step in range(kind.num_steps):
            collectives.steps.append([])
            for micro in range(kind.accumulate):
                x = torch.randn(2, 3 + (step + 2 * rank) % 5, WIDTH, generator=data)
                with contextlib.ExitStack() as stack:
                    if session is not None:
                        stack.enter_context(session.step(x))
                    losses.append(_forward_and_backward(kind, wrapped, x, micro))
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                policies.append(session.policy.name)
                _asks(session, step, kind)
    found = {
        "losses": torch.stack(losses),
        "generator": torch.get_rng_state(),
        **{name: _local(tensor) for name, tensor in wrapped.state_dict().items()},
    }
    evicted = 0 if session is None else session._engine.ledger.counts.num_evictions
    return {
        "tensors": found,
        "whole": _digest(wrapped),
        "collectives": collectives.steps,
        "policies": policies,
        "evictions": evicted,
    }


def _forward_and_backward(
    kind: Kind, wrapped: nn.Module, x: torch.Tensor, micro: int
) -> torch.Tensor:
    half = torch.autocast("cpu", torch.bfloat16, enabled=kind.wrapper == "ddp-bf16")
    with _not_reducing(wrapped, reduces=micro == kind.accumulate - 1):
        with half:
            loss = wrapped(x).float().square().mean()
        loss.backward()
    return loss.detach()


@contextlib.contextmanager
def _not_reducing(wrapped: nn.Module, *, reduces: bool) -> Iterator[None]:
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(reduces)
        yield
    elif reduces:
        yield
    else:
        with wrapped.no_sync():  # type: ignore[operator] # of DDP and FSDP1
            yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def _digest(wrapped: nn.Module) -> str:
    """Returns a digest of the whole weights, which all ranks must share."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    full: Any = contextlib.nullcontext()
    if isinstance(wrapped, FullyShardedDataParallel):
        full = FullyShardedDataParallel.summon_full_params(wrapped)
    digest = hashlib.sha256()
    with full:
        for parameter in wrapped.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            bits = whole.detach().clone().view(-1).view(torch.uint8)  # FSDP resizes its own
            digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def compare(kind: Kind) -> dict[str, Any]:
    """Trains plainly and with rematic on this rank, and returns what is the same."""
    plain, ours = train(kind, ours=False), train(kind, ours=True)
    wanted, found = plain["tensors"], ours["tensors"]
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    return {
        "different": [n for n in wanted if not torch.equal(wanted[n], found[n])],
        "same_collectives": plain["collectives"] == ours["collectives"],
        "collectives": len(ours["collectives"][-1]),
        "whole": ours["whole"],
        "policies": ours["policies"],
        "evictions": ours["evictions"],
    }


def _worker(rank: int, kinds: list[Kind], store: str, results: Any) -> None:  # noqa: ANN401
    torch.set_num_threads(1)
    logging.getLogger("rematic").setLevel(logging.ERROR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=kinds[0].num_ranks,
        timeout=datetime.timedelta(seconds=WATCHDOG_SECONDS),
    )
    for number, kind in enumerate(kinds):
        try:
            results.put((rank, number, compare(kind)))
        except Exception as error:
            results.put((rank, number, {"error": f"{type(error).__name__}: {str(error)[:300]}"}))
            return
    dist.barrier()
    dist.destroy_process_group()


def run(kinds: list[Kind]) -> Iterator[tuple[Kind, str, list[dict[str, Any]]]]:
    """Yields each kind with `same`, or what is wrong, and what each rank found."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([train.__module__])  # imported once for all ranks
    for num_ranks in sorted({kind.num_ranks for kind in kinds}):
        left = [kind for kind in kinds if kind.num_ranks == num_ranks]
        while left:
            done = _run_together(context, left)
            for kind, found in zip(left, done, strict=False):
                yield kind, judge(kind, found), found
            if len(done) < len(left) and not done:
                yield left[0], "a rank hangs or died", []
                done = [[]]
            left = left[len(done) :]


def judge(kind: Kind, ranks: list[dict[str, Any]]) -> str:
    """Returns `same`, or the first thing that is not as it must be."""
    errors = [found["error"] for found in ranks if "error" in found]
    if errors or len(ranks) < kind.num_ranks:
        return f"error: {errors[0]}" if errors else "a rank hangs or died"
    different = [name for found in ranks for name in found["different"]]
    if different:
        return f"different bits: {', '.join(different[:3])}"
    if not all(found["same_collectives"] for found in ranks):
        return "different collectives"
    if len({found["whole"] for found in ranks}) > 1:
        return "ranks have drifted apart"
    if any(found["policies"] != ranks[0]["policies"] for found in ranks):
        return "policies changed at different steps"
    if len(set(ranks[0]["policies"])) < 3:
        return f"the policies did not change: {set(ranks[0]['policies'])}"
    if ranks[0]["evictions"] or not ranks[1]["evictions"]:
        return "not one rank alone has evicted"
    return "same"


def _run_together(context: Any, kinds: list[Kind]) -> list[list[dict[str, Any]]]:  # noqa: ANN401
    """Runs kinds of one number of ranks in the same processes, up to the first error."""
    num_ranks = kinds[0].num_ranks
    results = context.Queue()
    found: dict[int, dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(rank, kinds, f"{folder}/store", results))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        seen = time.monotonic()
        while sum(map(len, found.values())) < num_ranks * len(kinds):
            if not results.empty():
                rank, number, outcome = results.get()
                found.setdefault(number, {})[rank] = outcome
                seen = time.monotonic()
            elif time.monotonic() - seen > _patience(kinds) or not any(
                process.is_alive() for process in processes
            ):
                break
            else:
                time.sleep(0.02)
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [[found[n][rank] for rank in sorted(found[n])] for n in sorted(found)]


def _patience(kinds: list[Kind]) -> float:
    """Returns after how many seconds without a result ranks count as hanging."""
    micro_batches = max(kind.num_steps * kind.accumulate for kind in kinds)
    return WATCHDOG_SECONDS + 0.5 * micro_batches


def main(arguments: list[str]) -> int:
    """Prints a line for each kind; 1 if any is not the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each training")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=list(WRAPPERS))
    options = parser.parse_args(arguments)
    kinds = [
        kind
        for kind in all_kinds(options.steps)
        if kind.num_ranks in options.ranks and kind.wrapper in options.wrappers
    ]
    is_wrong = False
    for kind, verdict, ranks in run(kinds):
        is_wrong |= verdict != "same"
        policies = ranks[0].get("policies", []) if ranks else []
        changes = sum(a != b for a, b in itertools.pairwise(policies))
        line = {
            **vars(kind),
            "verdict": verdict,
            "policy_changes": changes,
            "collectives_per_step": ranks[0].get("collectives") if ranks else None,
            "evictions": [found.get("evictions") for found in ranks],
        }
        print(json.dumps(line) if options.json else line, flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Memory runs out on one of two ranks of an Accelerator; run by `test_accelerate_ranks.py`.

The other one waits, or both stop at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import rematic
from tests.hosts.accelerate_loops import STEP_ALONE, Faults, Net, plugin_for
from tests.hosts.accelerate_ranks import prepared, same

NUM_BATCHES = 8
FAULTS = {
    "forward": {"forward": {2, 5, 6}},
    "loss": {"loss": {1, 4, 5}},
    "backward": {"backward": {2, 6, 7}},
    "everywhere": {"forward": {3}, "loss": {6}, "backward": {4, 5}},
}


def train(
    faults: Faults | None,
    *,
    plugin: rematic.RecomputePlugin | None = None,
    sharded: bool = False,
    exchange: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Returns what a rank has seen and trained; every step gathers its loss, as trainers do.

    Args:
        faults: Where memory runs out on this rank.
        plugin: The plugin, None for the plain loop.
        sharded: FSDP2 in place of DDP.
        exchange: What gathers the loss inside the step; None for the Accelerator.
    """
    accelerator = prepared(sharded=sharded, checkpointed=False, accumulate=2)
    if plugin is not None:
        plugin.attach(accelerator)
    torch.manual_seed(0)
    raw = Net(faults or Faults())
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), 1e-2))

    def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with accelerator.accumulate(model):
            loss = model(batch.pop("x")).square().mean()
            raw.faults().point("loss")
            gathered = (exchange or accelerator.gather)(loss.detach())
            accelerator.backward(loss)
            return gathered.clone()

    step = forward_backward if plugin is None else plugin.step(forward_backward)
    torch.manual_seed(10 + accelerator.process_index)
    found: list[torch.Tensor] = []
    for _ in range(NUM_BATCHES):
        found.append(step({"x": torch.randn(8, 16)}))
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.tensor([accelerator.step, accelerator.sync_gradients]))
    if plugin is not None:
        plugin.detach()
    return [*found, *(value.clone() for value in model.state_dict().values())]


def gathered_by_hand(loss: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(parts, loss)
    return torch.stack(parts)


def recovers(rank: int) -> None:
    """Whichever rank fails wherever, both see and train what they do without failures."""
    plain = train(None)
    for failing in (0, 1):
        for place, at in FAULTS.items():
            faults = Faults(**at) if rank == failing else Faults()
            assert same(train(faults, plugin=plugin_for(policy="keep")), plain), (place, failing)
            assert faults.num_fired == (4 if place == "everywhere" else 3) * (rank == failing)


def stops(rank: int, *, sharded: bool) -> None:
    """What one rank cannot repeat alone ends both of them, and neither waits.

    Ends the process, too: gloo's threads of a group that was aborted may take it down by themselves
    when Python has ended ("terminate called without an active exception").
    """
    at: dict[str, set[int]] = {"forward": {2}} if sharded else {"backward": {2}}
    plugin = plugin_for(policy="keep", recipe=STEP_ALONE)
    by_hand = None if sharded else gathered_by_hand
    faults = Faults(**at) if rank == 1 else Faults()
    try:
        train(faults, plugin=plugin, sharded=sharded, exchange=by_hand)
    except RuntimeError as error:
        print(type(error).__name__, str(error).replace("\n", " "), flush=True)
        os._exit(0)
    raise AssertionError("expected both ranks to stop")


def main(port: str, rank: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    recovers(int(rank))
    print("equal")
    stops(int(rank), sharded=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

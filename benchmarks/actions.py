"""What each action costs and keeps, against the plain step and against torch's own mechanism.

    python benchmarks/actions.py                       # about a quarter of an hour on one core
    python benchmarks/actions.py --lengths 512 --rounds 5 --json

One small Llama per way, all equal, run the same batch in turn in one process. An action is
compared with what a user of torch would write instead: `torch.utils.checkpoint` on every block, the
same with selective contexts, hooks that write what autograd saves to files, or both, and for `tile`
slices of the MLP with a checkpoint each. The two run one right after the other, now this one first
and now that one, and the pairs in another order in each round, so that a slow moment of the machine
and what the way before left behind (caches, pages to be written) fall on all alike. Bytes kept are
those alive at the end of forward beyond those before it, counted exactly by a simulated probe in a
step that is not timed.

`seconds` are those of the clock, `processor` those that the processor worked for the process: where
other programs run, the second tell small differences better, but they leave out waiting for a disk.

On a CPU `offload` moves to a scratch file, where `save_on_cpu` would move nothing: a tensor that is
on the CPU is its own copy. So its counterpart writes files, too, one per tensor and none for
parameters, which is what torch's tutorial on these hooks shows. `compress` has no counterpart.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the model is shared

import rematic
from benchmarks.idle_overhead import VOCABULARY, make_llama
from rematic.memory import SimulatedProbe, use_caching_malloc
from rematic.policy import action_named
from rematic.recipes import PolicyConfig, Recipe

BAR = 1.03
"""The ratio of seconds to torch's own mechanism that is aimed at."""

aten = torch.ops.aten
EXPENSIVE_OPS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What published op lists keep: matrix products and attention, by the names they have on a CPU."""

PEERS = {
    "keep": "plain",
    "recompute": "torch checkpoint",
    "selective": "torch selective contexts",
    "offload": "torch hooks to files",
    "recompute+offload": "torch checkpoint, hooks to files",
    "compress": None,
    "tile": "torch checkpoint of slices of the MLP",
}
"""Every action with what it replaces."""

NUM_TILES = 4
"""The slices of the sequence that an MLP runs in."""

Step = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a step."""

    name: str
    """The action, or the mechanism of torch."""

    step: Step
    """Runs forward and backward."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    """Runs forward and returns the loss."""


class Times(NamedTuple):
    """What one step took."""

    seconds: float
    """By the clock."""

    processor: float
    """Seconds that the processor worked for the process."""


def main() -> None:
    """Measures every way at every length and prints a table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    caching = use_caching_malloc()
    rows = [row for length in arguments.lengths for row in measure(length, arguments)]
    compared = [row["seconds_vs_torch"] for row in rows if row["seconds_vs_torch"] is not None]
    result = {
        "seconds_vs_torch_max": max(compared),
        "processor_vs_torch_max": max(
            row["processor_vs_torch"] for row in rows if row["processor_vs_torch"] is not None
        ),
        "bar": BAR,
        "rows": rows,
        "caching_malloc": caching,
        "torch": torch.__version__,
        **vars(arguments),
    }
    print(json.dumps(result) if arguments.json else _as_text(rows))


def measure(length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for every action at one length."""
    ids = torch.randint(0, VOCABULARY, (1, length))
    with contextlib.ExitStack() as stack:
        ways = _ways(arguments, stack)
        for way in ways.values():  # the first steps learn, and warm the allocator up
            way.step(ids), way.step(ids)
        kept = {name: _kept_bytes(way, ids) for name, way in ways.items()}
        times: dict[str, list[Times]] = {name: [] for name in ways}
        for i in range(arguments.rounds):
            for name in _order(i, arguments.actions):
                times[name].append(_timed(ways[name].step, ids))
    return [
        _row(action, peer, length, times, kept) for action, peer in PEERS.items() if action in ways
    ]


def _order(round_number: int, actions: list[str]) -> list[str]:
    """Returns each way once: an action beside its peer, and all pairs shuffled."""
    pairs = [[name for name in (PEERS[action], action) if name is not None] for action in actions]
    if "keep" not in actions:
        pairs.append(["plain"])
    random.Random(round_number).shuffle(pairs)
    return [name for pair in pairs for name in (pair[::-1] if round_number % 2 else pair)]


def _row(
    action: str,
    peer: str | None,
    length: int,
    times: dict[str, list[Times]],
    kept: dict[str, int],
) -> dict[str, Any]:
    row = {
        "length": length,
        "action": action,
        "peer": peer,
        "seconds_median": statistics.median(t.seconds for t in times[action]),
        "kept_bytes": kept[action],
        "kept_vs_plain": kept[action] / kept["plain"],
        "kept_vs_torch": None if peer is None else kept[action] / kept[peer],
    }
    for unit in Times._fields:
        mine, plain = _column(times[action], unit), _column(times["plain"], unit)
        row[f"{unit}_vs_plain"] = statistics.median(_ratios(mine, plain))
        if peer is None:
            row |= dict.fromkeys((f"{unit}_vs_torch", f"{unit}_vs_torch_spread"))
            continue
        theirs = _column(times[peer], unit)
        against = _ratios(mine, theirs)
        row[f"{unit}_vs_torch"] = statistics.median(against)
        row[f"{unit}_vs_torch_spread"] = (min(against), *_quartiles(against), max(against))
        row[f"peer_{unit}_vs_plain"] = statistics.median(_ratios(theirs, plain))
    return row


def _column(times: list[Times], unit: str) -> list[float]:
    return [getattr(t, unit) for t in times]


def _quartiles(ratios: list[float]) -> tuple[float, float]:
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, third


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _ways(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Way]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    to_files = functools.partial(_saved_in_files, folder)
    peers: dict[str, Callable[[nn.Module], None]] = {
        "plain": lambda model: None,
        "torch checkpoint": lambda model: _wrap_blocks(model, _checkpointed),
        "torch selective contexts": lambda model: _wrap_blocks(model, _selectively),
        "torch hooks to files": lambda model: _wrap_blocks(model, to_files),
        "torch checkpoint, hooks to files": lambda model: _wrap_blocks(
            model, lambda forward: to_files(_checkpointed(forward))
        ),
        "torch checkpoint of slices of the MLP": lambda model: _wrap(
            [block.mlp for block in model.model.layers], _checkpointed_in_slices
        ),
    }
    ways = {}
    for name, prepare in peers.items():
        model = make_llama(arguments)
        prepare(model)
        ways[name] = Way(name=name, step=_step(model), forward=_forward(model))
    for name in arguments.actions:
        model = make_llama(arguments)
        session = rematic.attach(model, recipe=_recipe(name), policy=_policy(name), budget="64GiB")
        stack.callback(session.detach)
        ways[name] = Way(name=name, step=_attached_step(model, session), forward=_forward(model))
    return ways


def _recipe(action: str) -> Recipe:
    units = ("*.mlp",) if action == "tile" else ()
    return Recipe(policy=PolicyConfig(units=units, allow_lossy=True))


def _policy(action: str) -> rematic.Policy:
    options = {"num_tiles": NUM_TILES} if action == "tile" else {}
    rule = rematic.Rule(pattern="*", action=action_named(action, **options))
    return rematic.Policy(name=action, rules=(rule,))


def _wrap_blocks(model: nn.Module, wrapped: Callable[..., Any]) -> None:
    _wrap(list(model.model.layers), wrapped)


def _wrap(modules: list[nn.Module], wrapped: Callable[..., Any]) -> None:
    for module in modules:
        module.forward = wrapped(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(checkpoint, forward, use_reentrant=False)


def _selectively(forward: Callable[..., Any]) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, EXPENSIVE_OPS)
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _checkpointed_in_slices(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden: torch.Tensor) -> torch.Tensor:
        tiles = hidden.tensor_split(NUM_TILES, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)

    return run


def _saved_in_files(folder: Path, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the block returns
        with saved_tensors_hooks(functools.partial(_write, folder), _read):
            return forward(*args, **kwargs)

    return run


def _write(folder: Path, tensor: torch.Tensor) -> torch.Tensor | Path:
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return tensor
    path = folder / uuid.uuid4().hex
    torch.save(tensor, path)
    return path


def _read(packed: torch.Tensor | Path) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    tensor = torch.load(packed)
    packed.unlink()
    return tensor


def _forward(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids).loss


def _step(model: nn.Module) -> Step:
    return lambda ids: _forward(model)(ids).backward()


def _attached_step(model: nn.Module, session: rematic.Session) -> Step:
    def step(ids: torch.Tensor) -> None:
        with session.step({"input_ids": ids}):
            _forward(model)(ids).backward()

    return step


def _kept_bytes(way: Way, ids: torch.Tensor) -> int:
    with SimulatedProbe() as probe:
        before = probe.allocated_bytes()
        loss = way.forward(ids)
        kept = probe.allocated_bytes() - before
        loss.backward()
    return kept


def _timed(step: Step, ids: torch.Tensor) -> Times:
    start, worked = time.perf_counter(), time.process_time()
    step(ids)
    return Times(time.perf_counter() - start, time.process_time() - worked)


def _as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        "length  action             time/plain  time/torch (quartiles)  processor/torch (quartiles)"
        "  kept/plain  kept/torch  torch's own"
    ]
    for row in rows:
        kept = "-" if row["peer"] is None else f"{row['kept_vs_torch']:.3f}"
        lines.append(
            f"{row['length']:6}  {row['action']:17}  {row['seconds_vs_plain']:10.3f}  "
            f"{_against(row, 'seconds'):22}  {_against(row, 'processor'):27}  "
            f"{row['kept_vs_plain']:10.3f}  {kept:>10}  {row['peer'] or 'none'}"
        )
    return "\n".join(lines)


def _against(row: dict[str, Any], unit: str) -> str:
    if row["peer"] is None:
        return "-"
    _, first, third, _ = row[f"{unit}_vs_torch_spread"]
    return f"{row[f'{unit}_vs_torch']:.3f} ({first:.3f} to {third:.3f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--actions", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Runs the architectures of transformers under every lossless action, and compares all bits.

    .venv/bin/python benchmarks/architectures.py --json            # hours on one core
    .venv/bin/python benchmarks/architectures.py --only llama t5 mamba --json
    .venv/bin/python benchmarks/architectures.py --stride 20

For each architecture a tiny model with random weights and dropout trains three micro-batches with
padding (two are accumulated, then SGD steps), plainly and under each way; losses, gradients,
weights, buffers and generators must be equal to the bit. Eager attention with padding on the left
goes through all ways, SDPA with padding on the right and eager attention under bf16 autocast
through `mixed`. What fails plainly or is not deterministic is left out, with the reason.

Each architecture is a process of its own that ends after `--timeout` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import logging
import multiprocessing
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are shared

import rematic
from benchmarks.architecture_batches import Batch, kinds_for
from benchmarks.architecture_models import model_types, tiny_model
from benchmarks.fault_marks import Mark
from rematic.activations import find_units
from rematic.activations.record import Holder
from rematic.policy import ACTIONS, Policy, Rule
from rematic.stash import DiskStash

WAYS = ("selective", "recompute", "recompute+offload", "offload", "evicted", "mixed")
"""Actions, and `evicted`: kept, with evictions at random moments; `mixed`: the actions in turn,
with evictions, too."""
EVICTION_CHANCE = 0.03
"""Of each record, whenever a tensor is unpacked and before each backward."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way has shown of one architecture."""

    model: str
    """Architecture, attention, precision."""
    way: str
    """One of `WAYS`, or `plain`."""
    result: str
    """`equal`, `kept` (equal, with units that are kept), `wrong`, `error`, or `left out`."""
    why: str = ""
    """What differs, why units are kept, or what failed."""
    num_units: int = 0
    num_replays: int = 0


def judge(
    name: str, model: nn.Module, batches: Sequence[Batch], ways: Sequence[str], *, autocast: bool
) -> Iterator[Row]:
    """Yields a row for each way that a model can train."""
    train = functools.partial(_train, batches=batches, autocast=autocast)
    try:
        plain, again = train(copy.deepcopy(model)), train(copy.deepcopy(model))
    except Exception as error:
        yield Row(model=name, way="plain", result="left out", why=_in_words(error))
        return
    if again.differs_from(plain):
        yield Row(model=name, way="plain", result="left out", why="it is not deterministic")
        return
    for way in ways:
        try:
            yield _compare(name, copy.deepcopy(model), way, train, plain)
        except Exception as error:
            yield Row(model=name, way=way, result="error", why=_in_words(error))


def _compare(name: str, model: nn.Module, way: str, train: Callable[..., Mark], plain: Mark) -> Row:
    session = rematic.attach(model, policy=_policy(model, way), budget="64GiB")
    try:
        evict = _evicting(session) if way in ("evicted", "mixed") else _nothing
        differing = train(model, session=session, evict=evict).differs_from(plain)
        units = session._engine.units
        reasons = sorted({unit.pinned for unit in units if unit.pinned is not None})
        return Row(
            model=name,
            way=way,
            result="wrong" if differing else "kept" if reasons else "equal",
            why="; ".join(differing[:4] or reasons),
            num_units=len(units),
            num_replays=session._engine.ledger.counts.replays.total(),
        )
    finally:
        session.detach()


def _policy(model: nn.Module, way: str) -> Policy:
    if way == "evicted":
        return Policy(name=way, default=ACTIONS["keep"]())
    if way != "mixed":
        return Policy(name=way, default=ACTIONS[way]())
    turns = ("recompute", "keep", "selective", "offload", "recompute+offload")
    rules = tuple(
        Rule(pattern=name, action=ACTIONS[turns[i % len(turns)]]())
        for i, (name, _) in enumerate(find_units(model))
    )
    return Policy(name=way, rules=rules, default=ACTIONS["keep"]())


def _nothing() -> None:
    pass


def _evicting(session: rematic.Session) -> Callable[[], None]:
    ledger, draw = session._engine.ledger, random.Random(3)
    unpack = ledger.unpack

    def evict() -> None:
        for record in ledger.records():
            if draw.random() < EVICTION_CHANCE:
                record.evict()

    def evict_and_unpack(holder: Holder) -> torch.Tensor:
        evict()
        return unpack(holder)

    ledger.unpack = evict_and_unpack  # type: ignore[method-assign]
    return evict


def _train(
    model: nn.Module,
    *,
    batches: Sequence[Batch],
    autocast: bool,
    session: rematic.Session | None = None,
    evict: Callable[[], None] = _nothing,
) -> Mark:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    losses = []
    for i, batch in enumerate(batches):
        if i == 2:
            optimizer.step()
            optimizer.zero_grad()
        with contextlib.nullcontext() if session is None else session.step(batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model(**batch))
            evict()
            loss.backward()
        losses.append(loss.detach())
    return _mark(model, losses)


def _mark(model: nn.Module, losses: Sequence[torch.Tensor]) -> Mark:
    values: dict[str, torch.Tensor | None] = {f"loss {i}": loss for i, loss in enumerate(losses)}
    for key, parameter in model.named_parameters():
        values[f"weight {key}"] = parameter.detach().clone()
        values[f"gradient {key}"] = parameter.grad
    values |= {f"buffer {key}": buffer.clone() for key, buffer in model.named_buffers()}
    values["generator"] = torch.get_rng_state()
    values["generator of Python"] = torch.tensor(random.getstate()[1])
    values["generator of NumPy"] = torch.tensor([*map(int, np.random.get_state()[1])])
    return Mark(values=values)


def loss_of(output: Any) -> torch.Tensor:  # noqa: ANN401 - whatever a model returns
    """Returns the loss of an output, or one made from all that it holds.

    Raises:
        ValueError: If nothing in it needs a gradient.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    found = [one for one in _tensors(output) if one.is_floating_point() and one.requires_grad]
    if not found:
        raise ValueError("nothing that the model returns needs a gradient")
    return torch.stack([one.float().pow(2).mean() for one in found]).sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - whatever a model returns
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) or is_dataclass(value):
        parts = value if isinstance(value, (list, tuple)) else vars(value).values()
        for part in value.values() if isinstance(value, dict) else parts:
            yield from _tensors(part)


def prepare(
    model_type: str, attention: str, *, left: bool, number: int = 3
) -> tuple[nn.Module, list[Batch]]:
    """Builds a small model and batches that it can train on.

    Args:
        model_type: Name of the architecture.
        attention: `eager` or `sdpa`.
        left: Whether padding is on the left.
        number: How many batches.

    Raises:
        ValueError: If there is none; says why.
    """
    reasons = []
    for dropout in (0.1, 0.0):
        torch.manual_seed(0)
        try:
            model = tiny_model(model_type, attention, dropout=dropout)
        except Exception as error:
            reasons.append(_in_words(error))
            continue
        for name, kind in kinds_for(model):
            generator = torch.Generator().manual_seed(5)
            try:
                batches = [kind.make(model.config, generator, left) for _ in range(number)]
                _try(copy.deepcopy(model), batches[0])
            except Exception as error:
                reasons.append(f"{name}: {_in_words(error)}")
            else:
                return model, batches
    raise ValueError("; ".join(reasons) or "no kind of batch fits")


def _try(model: nn.Module, batch: Batch) -> None:
    loss_of(model(**batch)).backward()
    if all(parameter.grad is None for parameter in model.parameters()):
        raise ValueError("no parameter gets a gradient")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def rows_of(model_type: str) -> Iterator[Row]:
    """Yields everything that is tried with one architecture."""
    for attention, left in (("eager", True), ("sdpa", False)):
        name = f"{model_type}, {attention}"
        try:
            model, batches = prepare(model_type, attention, left=left)
        except ValueError as error:
            yield Row(model=name, way="plain", result="left out", why=str(error))
            continue
        ways = WAYS if attention == "eager" else ("mixed",)
        yield from judge(name, model, batches, ways, autocast=False)
        if attention == "eager":
            yield from judge(f"{name}, bf16", model, batches, ("mixed",), autocast=True)


def _send(model_type: str, connection: Any) -> None:  # noqa: ANN401 - of multiprocessing
    for row in rows_of(model_type):
        connection.send(row)
    connection.close()


def _in_a_process(model_type: str, seconds: float) -> list[Row]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, sender))
    process.start()
    sender.close()
    rows: list[Row] = []
    with contextlib.suppress(EOFError):
        while receiver.poll(seconds):
            rows.append(receiver.recv())
        process.kill()
        rows.append(Row(model=model_type, way="plain", result="left out", why="it takes too long"))
    process.join()
    if process.exitcode and process.exitcode > 0:
        rows.append(Row(model=model_type, way="plain", result="error", why="its process failed"))
    return rows


def main() -> None:
    """Goes through the architectures and prints a tally."""
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    names = arguments.only or model_types()[:: arguments.stride]
    disk = functools.partial(DiskStash, min_bytes=1)  # everything moves: the models are small
    with mock.patch("rematic.activations.stash_places.DiskStash", disk):
        rows = [row for name in names for row in _told(name, arguments)]
    tally = Counter(row.result for row in rows)
    compared = [row for row in rows if row.way != "plain"]
    result = {
        "architectures": len({row.model.split(",")[0] for row in compared}),
        "compared": len(compared),
        **{name: tally[name] for name in ("equal", "kept", "wrong", "error", "left out")},
        "rows": [asdict(row) for row in rows],
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        del result["rows"]
        print(result)
    sys.exit(1 if tally["wrong"] or tally["error"] else 0)


def _told(name: str, arguments: argparse.Namespace) -> list[Row]:
    rows = _in_a_process(name, arguments.timeout)
    tally = dict(Counter(row.result for row in rows))
    print(name, tally, file=sys.stderr, flush=True)
    for row in rows:
        if row.result in ("wrong", "error", "kept"):
            print(f"    {row.model}, {row.way}: {row.result}: {row.why}", file=sys.stderr)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="architectures, by their names in transformers")
    parser.add_argument("--stride", type=int, default=1, help="every n-th architecture")
    parser.add_argument("--timeout", type=float, default=60, help="seconds without a result")
    parser.add_argument("--json", action="store_true", help="print the rows for scripts")
    return parser.parse_args()


if __name__ == "__main__":
    main()

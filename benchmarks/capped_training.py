"""Trains `tiny-cpu` under a heap cap that really fails allocations, and compares all that is left.

Each way is a process of its own, since a cap holds for a process: `plain` without a cap, `kept` the
same under it, which is meant to run out of memory; and with rematic under it `planned` (the budget
is the cap, so that plans avoid failures) and, blind to the cap, `op` (keeps everything; failures
are answered at the op first) and `unit` (the retry at the op turned off). Weights, optimizer state
and losses must have the bits of `plain`.

    .venv/bin/python benchmarks/capped_training.py --json
    .venv/bin/python benchmarks/capped_training.py --json --ways plain op --steps 8 --layers 4 \
        --max-length 256 --cap 40MiB

Linux with glibc 2.33. The tests run a small slice (tests/test_capped_training.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rematic.byte_sizes import parse_bytes
from rematic.memory import capped_heap, is_out_of_memory, use_mapping_malloc, warm_up_threads
from rematic.training.environment import training_environment

if TYPE_CHECKING:
    from rematic.session import Session
    from rematic.training.batches import Batch
    from rematic.training.plain_loop import PlainLoop

RECOVERING = ("planned", "op", "unit")
WAYS = ("plain", "kept", *RECOVERING)
Row = dict[str, Any]


class StepRetries:
    """A journal that counts how often whole steps ran again."""

    def __init__(self) -> None:
        self.number = 0

    def write(self, event: Any) -> None:  # noqa: ANN401 - what a journal takes
        """Takes one event."""
        self.number += event["event"] == "retry" and event.get("level") == "step"


def train(way: str, options: argparse.Namespace) -> Row:
    """Trains one way in this process; returns its figures."""
    import torch

    from rematic.recipes import load_recipe
    from rematic.training.plain_loop import PlainLoop

    overrides = (
        f"data.max_length={options.max_length}",
        f"model.config.num_hidden_layers={options.layers}",
    )
    torch.set_num_threads(options.threads)
    recipe = load_recipe("tiny-cpu", overrides)
    loop = PlainLoop(recipe, max_length=options.max_length)
    batches = list(_batches(recipe, options.steps))
    warm_up_threads()
    if way == "plain":
        return _run(loop, batches, None)
    cap = parse_bytes(options.cap)
    session, retries = None, StepRetries()
    if way in RECOVERING:
        session = _attach(loop, way, cap=cap, retries=retries)
    with capped_heap(cap) as heap:
        try:
            row = _run(loop, batches, session)
        except RuntimeError as error:
            heap.release_ballast()
            if not is_out_of_memory(error):
                raise
            return {"out_of_memory": str(error).split("\n")[0][:200]}
    return {**row, "step_retries": retries.number}


def _batches(recipe: Any, steps: int) -> Iterator[Batch]:  # noqa: ANN401 - a recipe
    from rematic.training.batches import make_batch
    from rematic.training.data import load_data

    loader = load_data(recipe).loader
    order = loader.order(0)
    for number in range(steps):
        yield make_batch(loader.examples[order[number % len(order)]].ids)


def _attach(loop: PlainLoop, way: str, *, cap: int, retries: StepRetries) -> Session:
    import rematic
    from rematic.recipes import PolicyConfig, Recipe

    planned = way == "planned"
    op_retry = "never" if way == "unit" else "auto"
    return rematic.attach(
        loop.model,
        loop.optimizer,
        recipe=Recipe(policy=PolicyConfig(op_retry=op_retry)),
        policy="planned" if planned else "keep",
        budget=loop.idle_bytes + cap if planned else "64GiB",  # blind: only failures tell
        probe="host",
        journal=retries,
    )


def _run(loop: PlainLoop, batches: list[Batch], session: Session | None) -> Row:
    losses, counts = [], {"op_retries": 0, "unit_retries": 0, "evictions": 0}
    steps_with_retry = 0
    for number, batch in enumerate(batches):
        loop.start_document(number)
        if session is None:
            loss = loop.forward_backward(batch)
        else:
            loss = session.run(loop.forward_backward, batch)
            found = {key: getattr(session.last_step, key) for key in counts}
            counts = {key: counts[key] + found[key] for key in counts}
            steps_with_retry += found["op_retries"] + found["unit_retries"] > 0
        loop.update()
        losses.append(float(loss).hex())
    row = {"steps": len(batches), "losses": losses, "digest": digest_of(loop)}
    return row if session is None else {**row, **counts, "steps_with_retry": steps_with_retry}


def digest_of(loop: PlainLoop) -> str:
    """Returns a hash of the bits of weights, buffers and optimizer state."""
    import torch

    state = loop.optimizer.state_dict()["state"]
    tensors = {f"model {name}": value for name, value in loop.model.state_dict().items()}
    for index, values in state.items():
        tensors |= {f"optimizer {index} {name}": value for name, value in values.items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def compare(rows: dict[str, Row]) -> Row:
    """Returns every way beside `plain`: whether it finished and has its bits, what it took."""
    plain = rows["plain"]
    found: Row = {}
    for way, row in rows.items():
        if way == "plain":
            continue
        finished = "digest" in row
        same = finished and all(row[key] == plain[key] for key in ("digest", "losses"))
        figures = {k: v for k, v in row.items() if k not in ("losses", "digest")}
        found[way] = {"finished": finished, "bit_equal": same, **figures}
    return found


def run_child(ways: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    """Runs ways one after the other in a new process.

    Raises:
        RuntimeError: If it dies.
    """
    command = [sys.executable, __file__, "--child", "--ways", *ways]
    for key in ("steps", "layers", "max_length", "cap", "threads"):
        command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    done = subprocess.run(command, capture_output=True, text=True, env=training_environment())
    if done.returncode:
        raise RuntimeError(f"{ways} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows: dict[str, Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def arguments_of(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=40, help="documents, one update each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--max-length", type=int, default=512, help="tokens")
    parser.add_argument("--cap", default="140MiB", help="over weights and optimizer state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Prints the comparison; 1 if a way with rematic does not finish with the bits of `plain`."""
    options = arguments_of(arguments)
    if options.child:
        use_mapping_malloc()  # before torch allocates anything
        logging.getLogger("rematic").setLevel(logging.ERROR)
        print(json.dumps({way: train(way, options) for way in options.ways}))
        return 0
    rows = run_child(["plain"], options)
    for way in options.ways:
        if way != "plain":
            rows |= run_child([way], options)
    found = compare(rows)
    if options.json:
        print(json.dumps({"cap": options.cap, "steps": options.steps, **found}))
    else:
        for way, row in found.items():
            print(way, row)
    return int(not all(row["bit_equal"] for way, row in found.items() if way in RECOVERING))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The headline: documents of varying length under a budget, rematic against everything static.

Every way to train is a child process with the same model under a real heap cap (`RLIMIT_DATA`); the
children take turns, document by document. Budget over idle = peak of recompute-all + f x (peak of
keep-all - peak of recompute-all), both measured at the longest document (`--longest`).

    .venv/bin/python benchmarks/variable_length.py --json --out figures.json
    .venv/bin/python benchmarks/variable_length.py --quick --json

The peers: nothing; Hugging Face's checkpointing; `torch.utils.checkpoint` on every block and on
every second; the op list of torchtitan through torch's selective contexts; the best fixed mix of
{keep, list, recompute} by torch's own means; the best fixed mix of rematic's op sets; and the best
plan for each length, which no rival could know. The last three come from an exhaustive search over
a table measured in the same run (seconds) and the traced bytes. A mix that does not survive the
longest document for real, or only since blocks under rematic's actions evict, is passed over for
the best one that needs 1 % less; so are plans for a length, in steps of 2 %. A document that runs
out of memory is counted as `lost`.

Times are those of the processor (user and system), forward, backward and update: with one thread
and nothing else running that is the time of the clock, which stands beside them. They count
everything that rematic does, the tracing of the model included; keys that end in `_settled` leave
out the documents that it learned from. Linux with glibc 2.33.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.variable_length_data import WORKLOADS, load_workload
from benchmarks.variable_length_figures import as_text, summary
from benchmarks.variable_length_run import WAYS, Bench

KEYS = ("time_vs_full", "time_vs_best_static_list", "time_vs_best_static_own", "time_vs_optimum")


def main(arguments: list[str]) -> int:
    """Runs what is asked for and prints the figures; 1 if rematic lost a document."""
    options = arguments_of(arguments)
    bench = Bench(options, deadline=time.monotonic() + 60 * options.minutes)
    state: dict[str, Any] = {"rows": [], "settings": _settings(options)}
    if options.resume and options.out and options.out.exists():
        state = json.loads(options.out.read_text("utf-8"))

    def save() -> None:
        if options.out:
            partial = options.out.with_suffix(".partial")
            partial.write_text(json.dumps(state, indent=1), "utf-8")
            partial.replace(options.out)

    bench.measure_table(state, save)
    workloads = {
        name: load_workload(name, longest=options.longest, every=options.every)
        for name in options.workloads
    }
    for epoch in range(options.epochs):
        for workload in workloads.values():
            for share in options.budgets:
                bench.run_epoch(state, workload, share=share, epoch=epoch, save=save)
    result = summary(state, options)
    print(json.dumps(result) if options.json else as_text(result))
    return int(result["documents_lost"] > 0)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "layers": options.layers,
        "hidden_size": options.hidden_size,
        "longest": options.longest,
        "every": options.every,
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def arguments_of(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few documents")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25], help="f")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth document")
    parser.add_argument("--longest", type=int, default=2048, help="tokens")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3, help="of the table, at the longest")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop after so many")
    parser.add_argument("--out", type=Path, help="write what there is after each document")
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.hidden_size, options.longest = 4, 256, 768
        options.every, options.rounds = 30, 1
        options.workloads, options.budgets = ["corpus"], [0.5]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

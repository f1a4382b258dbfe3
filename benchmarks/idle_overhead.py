"""What rematic costs while nothing is wrong: attached steps against plain ones (contract 9).

    python benchmarks/idle_overhead.py            # 100 pairs, about two minutes on two cores
    python benchmarks/idle_overhead.py --json
    python benchmarks/idle_overhead.py --host accelerate    # or trainer, or another of idle_hosts

Two equal models, one attached with a budget that is never near, run the same batch in turn (plain
first, attached first, plain first, ...) in one process, so that a slow moment of the machine falls
on both. A step is forward, backward and the optimizer's, by the loop of a host. glibc keeps freed
memory, as a caching allocator does; without that, page faults are what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the hosts are a file of their own

from benchmarks.idle_hosts import HOSTS, Loop
from rematic.memory import use_caching_malloc

VOCABULARY = 320
BAR = 1.01
"""The median ratio that contract 9 allows."""


def main() -> None:
    """Runs the pairs and prints the median ratio with its spread."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    caching = use_caching_malloc()
    ratios, plain_seconds = measure(arguments)
    result = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "pairs": len(ratios),
        "bar": BAR,
        "plain_seconds_median": statistics.median(plain_seconds),
        "host": arguments.host,
        "tokens": arguments.tokens,
        "hidden_size": arguments.hidden_size,
        "layers": arguments.layers,
        "caching_malloc": caching,
        "torch": torch.__version__,
    }
    print(json.dumps(result) if arguments.json else _as_text(result))


def measure(arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Returns the ratio of each pair, and the seconds of each plain step."""
    plain, attached = (make_loop(arguments, attached=attached) for attached in (False, True))
    for _ in range(3):  # the first steps learn, and warm the allocator up
        plain.step(), attached.step()
    ratios, plain_seconds = [], []
    for i in range(arguments.pairs):
        order = (plain, attached) if i % 2 else (attached, plain)
        seconds = {id(loop): _seconds(loop.step) for loop in order}
        ratios.append(seconds[id(attached)] / seconds[id(plain)])
        plain_seconds.append(seconds[id(plain)])
    plain.close(), attached.close()
    return ratios, plain_seconds


def make_loop(arguments: argparse.Namespace, *, attached: bool) -> Loop:
    """Returns a loop of the host that was asked for, always over the same ids and weights."""
    model = make_llama(arguments)
    ids = torch.randint(0, VOCABULARY, (1, arguments.tokens))
    return HOSTS[arguments.host](model, {"input_ids": ids, "labels": ids}, attached)


def make_llama(arguments: argparse.Namespace) -> nn.Module:
    """Returns a small Llama, always with the same weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.hidden_size * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 64,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _as_text(result: dict[str, object]) -> str:
    quartiles = ", ".join(f"{q:.4f}" for q in result["ratio_quartiles"])
    return (
        f"{result['host']}: attached / plain over {result['pairs']} pairs at {result['tokens']} "
        f"tokens, hidden size {result['hidden_size']}, {result['layers']} layers: median "
        f"{result['ratio_median']:.4f} (quartiles {quartiles}; "
        f"{result['ratio_min']:.3f} to {result['ratio_max']:.3f}), bar {result['bar']}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--host", choices=tuple(HOSTS), default="plain")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    main()

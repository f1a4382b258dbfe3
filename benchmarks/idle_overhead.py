"""What rematic costs while nothing is wrong: attached steps against plain ones (contract 9).

    python benchmarks/idle_overhead.py            # 100 pairs, about two minutes on two cores
    python benchmarks/idle_overhead.py --json
    python benchmarks/idle_overhead.py --host accelerate    # by @plugin.step, which can repeat it

Two equal models, one attached with a budget that is never near, run the same batch in turn (plain
first, attached first, plain first, ...) in one process, so that a slow moment of the machine falls
on both. glibc keeps freed memory, as a caching allocator does; without that, page faults are what
is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import accelerate
import torch
import transformers
from torch import nn

import rematic
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
    plain, attached = make_llama(arguments), make_llama(arguments)
    ids = torch.randint(0, plain.config.vocab_size, (1, arguments.tokens))

    def plain_step() -> None:
        plain(input_ids=ids, labels=ids).loss.backward()

    attached_step, detach = _attached(attached, ids, host=arguments.host)

    for _ in range(3):  # the first steps learn, and warm the allocator up
        plain_step(), attached_step()
    ratios, plain_seconds = [], []
    for i in range(arguments.pairs):
        order = (plain_step, attached_step) if i % 2 else (attached_step, plain_step)
        seconds = {step: _seconds(step) for step in order}
        ratios.append(seconds[attached_step] / seconds[plain_step])
        plain_seconds.append(seconds[plain_step])
    detach()
    return ratios, plain_seconds


def _attached(
    model: nn.Module, ids: torch.Tensor, *, host: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a step of the attached model, and what detaches it."""
    batch = {"input_ids": ids}
    if host == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        plugin = rematic.RecomputePlugin(budget="64GiB").attach(accelerator)
        accelerator.prepare(model)

        @plugin.step
        def repeatable_step(batch: dict[str, torch.Tensor]) -> None:
            accelerator.backward(model(**batch, labels=ids).loss)

        return lambda: repeatable_step(batch), plugin.detach
    session = rematic.attach(model, budget="64GiB")

    def step() -> None:
        with session.step(batch):
            model(input_ids=ids, labels=ids).loss.backward()

    return step, session.detach


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
        f"attached / plain over {result['pairs']} pairs at {result['tokens']} tokens, hidden size "
        f"{result['hidden_size']}, {result['layers']} layers: median "
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
    parser.add_argument("--host", choices=("none", "accelerate"), default="none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    main()

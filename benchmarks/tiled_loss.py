"""What the tiled loss costs and how far it is from the plain one.

    python benchmarks/tiled_loss.py            # a minute on one core
    python benchmarks/tiled_loss.py --json

Three ways to the same loss and gradients: `plain` (logits whole), `tiled` (backward computes every
tile again) and `in_forward` (gradients computed tile by tile in forward, the road not taken). Times
are medians of interleaved runs, peaks come from a simulated probe: bytes over the inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from rematic.activations.tiled_loss import tiled_cross_entropy
from rematic.memory import SimulatedProbe, use_caching_malloc

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MIB = 1 << 20


def main() -> None:
    """Measures and prints errors per dtype, then seconds and peaks."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    caching = use_caching_malloc()
    result = {
        "errors": [
            row for dtype in ("float32", "bfloat16", "float16") for row in errors(dtype, arguments)
        ],
        "costs": [costs(dtype, arguments) for dtype in ("float32", "bfloat16")],
        "caching_malloc": caching,
        "torch": torch.__version__,
        **vars(arguments),
    }
    print(json.dumps(result) if arguments.json else _as_text(result))


def errors(dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares the tiled loss with the plain one, and both with 64 bits.

    By vocabulary: fewer tokens than classes, so that the gradient of the hidden states is added up
    over tiles. By tokens: more of them, and that of the weight is. With a frozen weight none is.
    """
    tokens, hidden_size, vocabulary = arguments.error_shape
    shape, turned = (tokens, hidden_size, vocabulary), (vocabulary, hidden_size, tokens)
    ways = {"by vocabulary": shape, "by tokens": turned, "frozen weight": shape}
    rows = []
    for way, sizes in ways.items():
        inputs = _inputs(*sizes, getattr(torch, dtype))
        exact = _outcome(_plain, *(t.double() for t in inputs[:2]), inputs[2])
        plain = _outcome(_plain, *inputs)
        tiled = _outcome(_tiled(sizes[0] // 8), *inputs, frozen=way == "frozen weight")
        names = ("loss", "d_hidden", "d_weight")
        for of, a, b, c in zip(names, tiled, plain, exact, strict=True):
            if a is not None and b is not None and c is not None:
                figures = {
                    "max_abs": float((a.double() - b.double()).abs().max()),
                    "relative": _relative(a, b),
                    "relative_to_64_bits": _relative(a, c),
                    "plain_relative_to_64_bits": _relative(b, c),
                }
                rows.append({"dtype": dtype, "way": way, "of": of, **figures})
    return rows


def costs(dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times the three ways in turn, and reads the peak of each."""
    inputs = _inputs(*arguments.cost_shape, getattr(torch, dtype))
    ways = {
        "plain": _plain,
        "tiled": _tiled(arguments.tile_tokens),
        "in_forward": lambda h, w, y: _GradientsInForward.apply(h, w, y, arguments.tile_tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.runs + 1):
        for name, loss in ways.items():
            start = time.perf_counter()
            _outcome(loss, *inputs)
            seconds[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {"dtype": dtype}
    for name, loss in ways.items():
        ratios = [a / b for a, b in zip(seconds[name][1:], seconds["plain"][1:], strict=True)]
        found[name] = {
            "seconds_median": statistics.median(seconds[name][1:]),
            "ratio_median": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "peak_mib": _peak(loss, *inputs) / MIB,
        }
    return found


class _GradientsInForward(torch.autograd.Function):
    """The alternative: no logits twice, but the gradient of the weight waits for backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context, without a public type
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        tile_tokens: int,
    ) -> torch.Tensor:
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape)
        losses = []
        for start in range(0, len(hidden), tile_tokens):
            rows = slice(start, start + tile_tokens)
            tile = F.linear(hidden[rows], weight).float().log_softmax(1)
            index = labels[rows, None]
            losses.append(-tile.gather(1, index))
            tile.exp_().scatter_add_(1, index, torch.full(index.shape, -1.0))
            gradient = tile.div_(len(hidden)).to(hidden.dtype)
            torch.mm(gradient, weight, out=d_hidden[rows])
            if hidden.dtype == d_weight.dtype:
                d_weight.addmm_(gradient.t(), hidden[rows])
            else:
                d_weight.add_(gradient.t() @ hidden[rows])
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None, None


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels)


def _tiled(tile_tokens: int) -> Loss:
    return lambda h, w, y: tiled_cross_entropy(h, w, y, tile_tokens=tile_tokens)


def _inputs(
    tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size)
    weight = torch.randn(vocabulary, hidden_size) / hidden_size**0.5
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, vocabulary, (tokens,))


def _outcome(
    loss: Loss,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    frozen: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
    value = loss(hidden, weight, labels)
    # as a gradient scaler does: the gradients of a mean are too small for 16 bits
    scale = 1024.0
    (value * scale).backward()
    gradients = (None if t.grad is None else t.grad / scale for t in (hidden, weight))
    return value.detach(), *gradients


def _peak(loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> int:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    probe = SimulatedProbe()
    probe.track([hidden, weight, labels])
    with probe:
        before = probe.allocated_bytes()
        loss(hidden, weight, labels).backward()
    return probe.peak_allocated_bytes - before


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _as_text(result: dict[str, Any]) -> str:
    lines = []
    for row in result["errors"]:
        numbers = "  ".join(f"{k} {v:.1e}" for k, v in row.items() if isinstance(v, float))
        lines.append(f"{row['dtype']:9} {row['way']:14} {row['of']:9} {numbers}")
    for row in result["costs"]:
        for name in ("plain", "tiled", "in_forward"):
            numbers = "  ".join(f"{key} {value:.3g}" for key, value in row[name].items())
            lines.append(f"{row['dtype']:9} {name:11} {numbers}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    shape = {"type": int, "nargs": 3, "metavar": ("TOKENS", "HIDDEN", "VOCABULARY")}
    parser.add_argument("--error-shape", default=(256, 128, 4096), **shape)
    parser.add_argument("--cost-shape", default=(1024, 256, 32000), **shape)
    parser.add_argument("--tile-tokens", type=int, default=128, help="for the costs")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each way")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The parts of the device check, most important first."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rematic
from benchmarks.device_model import Size, deviations, make_ids, make_model
from benchmarks.device_steps import (
    UNLIMITED,
    Watching,
    adapted_step,
    backward,
    now,
    only,
    trained,
    two_steps,
)
from rematic.memory import CudaProbe, SimulatedProbe, make_probe

LOSSLESS = ("keep", "selective", "recompute", "recompute+offload", "offload")
MAX_PREDICTION_ERROR = 0.25
"""Predicted over measured peak, less one, at lengths that were not measured."""
MAX_IDLE_RATIO = 1.01
"""What contract 9 allows where steps are long enough to tell, which those on a CPU are not."""
Figures = dict[str, Any]


class NotHere(Exception):
    """A part that this machine cannot run; says why."""


class _Events:
    """A journal that is only looked at."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Any) -> None:  # noqa: ANN401 - any mapping
        self.events.append(dict(event))


def parity(device: torch.device) -> Figures:
    """Every lossless action leaves what the plain step leaves: fp32, bf16, with dropout."""
    size = Size.on(device)
    results: dict[str, list[str]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for dropout in (0.0, 0.1):
            plain, again = (two_steps(device, size, dtype, dropout) for _ in range(2))
            for policy in LOSSLESS:
                found = two_steps(device, size, dtype, dropout, policy=policy)
                case = f"{policy} {str(dtype).removeprefix('torch.')} dropout {dropout}"
                results[case] = deviations(found, plain, again)
    wrong = {case: names[:4] for case, names in results.items() if names}
    return {"ok": not wrong, "cases": len(results), "wrong": wrong}


def out_of_memory(device: torch.device) -> Figures:
    """Memory really runs out in forward, loss, backward and optimizer; the op is run again."""
    size = Size.on(device)
    plain, plain_peak = trained(device, size)
    again, _ = trained(device, size)
    recomputed_peak = trained(device, size, policy="recompute")[1]
    rows, wrong = [], {}
    for share in (0.9, 0.7, 0.5, 0.3, 0.1):
        limit = recomputed_peak + int(share * (plain_peak - recomputed_peak))
        journal = _Events()
        with only(device, limit) as probe:
            found, _ = trained(device, size, policy="keep", journal=journal, probe=probe)
        retries = [event for event in journal.events if event["event"] == "retry"]
        names = deviations(found, plain, again)
        if names:
            wrong[f"share {share}"] = names[:4]
        rows.append(
            {
                "limit_share": share,
                "limit_bytes": limit,
                "op_retries": sum(event["level"] == "op" for event in retries),
                "ops": sorted({event["where"] for event in retries})[:6],
            }
        )
    answered = sum(row["op_retries"] for row in rows)
    return {"ok": not wrong and answered > 0, "wrong": wrong, "rows": rows}


def probe_values(device: torch.device) -> Figures:
    """The probe reports what `torch.cuda.memory_stats` counts."""
    if device.type != "cuda":
        raise NotHere("there is no CUDA device")
    probe = CudaProbe(device)
    held = [torch.empty(1 << shift, device=device) for shift in (16, 20, 24)]
    stats, snapshot = torch.cuda.memory_stats(device), probe.snapshot()
    pairs = {
        "allocated": (snapshot.allocated_bytes, stats["allocated_bytes.all.current"]),
        "reserved": (snapshot.reserved_bytes, stats["reserved_bytes.all.current"]),
        "peak": (snapshot.peak_allocated_bytes, stats["allocated_bytes.all.peak"]),
        "retries": (snapshot.num_alloc_retries, stats["num_alloc_retries"]),
        "cheap reading": (probe.allocated_bytes(), stats["allocated_bytes.all.current"]),
    }
    del held
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    free, total = torch.cuda.mem_get_info(device)
    within = 0 < (snapshot.capacity_bytes or 0) <= total
    return {
        "ok": not wrong and within,
        "wrong": wrong,
        "capacity_bytes": snapshot.capacity_bytes,
        "free_bytes": free,
        "total_bytes": total,
        "microseconds": _microseconds(probe.allocated_bytes),
    }


def varying_lengths(device: torch.device) -> Figures:
    """Documents of varying length in bf16: the planned policy against recomputing everything."""
    size = Size.on(device)
    lengths = [max(8, size.length // n) for n in (1, 8, 2, 16, 4, 8, 1, 3, 16, 6, 2, 12)]
    peaks = [
        trained(device, size, policy=p, dtype=torch.bfloat16)[1] for p in ("keep", "recompute")
    ]
    budget = peaks[1] + (peaks[0] - peaks[1]) // 2
    probe = None if device.type == "cuda" else SimulatedProbe()
    runs = {}
    for policy in ("recompute", "planned"):
        model = make_model(device, size, dtype=torch.bfloat16, dropout=0.1)
        inside = contextlib.nullcontext() if probe is None else probe
        if probe is not None:
            probe.track(model.parameters())
        session = rematic.attach(model, policy=policy, budget=max(budget, 1 << 20), probe=probe)
        with inside:
            torch.manual_seed(1)
            losses, seconds = [], []
            for _ in range(2):  # the first epoch learns
                losses, seconds = [], []
                for length in lengths:
                    ids = make_ids(device, size, length)
                    start = now(device)
                    losses.append(session.run(lambda ids, m=model: backward(m, ids), ids))
                    seconds.append(now(device) - start)
        session.detach()
        runs[policy] = (torch.stack(losses).tolist(), seconds)
    ratios = [a / b for a, b in zip(runs["planned"][1], runs["recompute"][1], strict=True)]
    return {
        "ok": runs["planned"][0] == runs["recompute"][0],
        "time_vs_full": sum(runs["planned"][1]) / sum(runs["recompute"][1]),
        "ratio_median": statistics.median(ratios),
        "documents": len(lengths),
    }


def offload_stress(device: torch.device) -> Figures:
    """Pinned copies on streams of their own stay right while other streams keep the device busy."""
    if device.type != "cuda":
        raise NotHere("there is no CUDA device, so no streams")
    size = Size.on(device)
    plain, again = (two_steps(device, size, torch.float32, 0.1) for _ in range(2))
    other, noise = torch.cuda.Stream(device), torch.randn(4096, 4096, device=device)
    wrong = {}
    for policy in ("offload", "recompute+offload"):
        for attempt in range(3):
            with torch.cuda.stream(other):
                for _ in range(20):
                    noise = (noise @ noise).tanh()
            found = two_steps(device, size, torch.float32, 0.1, policy=policy)
            names = deviations(found, plain, again)
            if names:
                wrong[f"{policy} {attempt}"] = names[:4]
    return {"ok": not wrong, "wrong": wrong}


def idle_overhead(device: torch.device) -> Figures:
    """What an attached step costs while memory is plenty."""
    size = Size.on(device)
    plain, attached = make_model(device, size), make_model(device, size)
    ids = make_ids(device, size)
    session = rematic.attach(attached, policy="planned", budget=UNLIMITED)
    backward(plain, ids)
    for _ in range(3):
        with session.step(ids):
            backward(attached, ids)
    ratios = []
    for i in range(30):
        seconds = {}
        for name in ("plain", "attached") if i % 2 else ("attached", "plain"):
            start = now(device)
            if name == "plain":
                backward(plain, ids)
            else:
                with session.step(ids):
                    backward(attached, ids)
            seconds[name] = now(device) - start
        ratios.append(seconds["attached"] / seconds["plain"])
    session.detach()
    median = statistics.median(ratios)
    return {
        "ok": device.type == "cpu" or median <= MAX_IDLE_RATIO,
        "ratio_median": median,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def compiled_units(device: torch.device) -> Figures:
    """Units compiled one by one: the bits of the compiled plain step, and nothing is recompiled."""
    size = Size.on(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    plain, again = (two_steps(device, size, torch.float32, 0.0, backend=backend) for _ in range(2))
    wrong = {}
    for policy in ("keep", "recompute"):
        found = two_steps(device, size, torch.float32, 0.0, policy=policy, backend=backend)
        names = deviations(found, plain, again)
        if names:
            wrong[policy] = names[:4]
    return {"ok": not wrong, "wrong": wrong, "backend": backend}


def quantized(device: torch.device) -> Figures:
    """A step over bitsandbytes' 4-bit layers with adapters made by hand."""
    try:
        import bitsandbytes  # noqa: F401 - only whether it is there
    except ImportError:
        raise NotHere("bitsandbytes is not installed") from None
    size = Size.on(device)
    plain, again = (adapted_step(device, size, None) for _ in range(2))
    wrong = {}
    for policy in ("keep", "recompute"):
        names = deviations(adapted_step(device, size, policy), plain, again)
        if names:
            wrong[policy] = names[:4]
    return {"ok": not wrong, "wrong": wrong}


def device_threads(device: torch.device) -> Figures:
    """Unpacking and the retry at the op work on the threads of the device's backward."""
    size = Size.on(device)
    seen: set[int] = set()
    model = make_model(device, size)
    session = rematic.attach(model, policy="recompute", budget=UNLIMITED)
    for block in model.blocks:
        block.mlp_norm = nn.Sequential(block.mlp_norm, Watching(seen))
    for _ in range(2):
        with session.step(make_ids(device, size)):
            backward(model, make_ids(device, size))
    session.detach()
    elsewhere = threading.get_ident() not in seen
    return {
        "ok": bool(seen) and (elsewhere or device.type == "cpu"),
        "threads": len(seen),
        "elsewhere": elsewhere,
    }


def predictions(device: torch.device) -> Figures:
    """Predicted peaks against measured ones, at lengths that were not seen before."""
    size = Size.on(device)
    model, journal = make_model(device, size), _Events()
    probe = make_probe("auto", device=device) if device.type == "cuda" else SimulatedProbe()
    inside = contextlib.nullcontext() if device.type == "cuda" else probe
    if isinstance(probe, SimulatedProbe):
        probe.track(model.parameters())
    session = rematic.attach(
        model, policy="planned", budget=UNLIMITED, probe=probe, journal=journal
    )
    rows = []
    with inside:
        for length in (size.length, size.length // 2, size.length // 4, size.length):
            with session.step(make_ids(device, size, length)):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                backward(model, make_ids(device, size, length))
            record = session.last_step
            measured = record.peak_bytes
            if device.type == "cuda":
                measured = torch.cuda.max_memory_allocated(device)
            if record.predicted_peak_bytes and measured:
                rows.append({"length": length, "error": record.predicted_peak_bytes / measured - 1})
    session.detach()
    within = all(abs(row["error"]) <= MAX_PREDICTION_ERROR for row in rows)
    return {"ok": bool(rows) and within, "rows": rows}


def recipes(device: torch.device) -> Figures:
    """Small recipes train: 4- and 8-bit weights, paged 8-bit AdamW, packing, a tiled loss."""
    from benchmarks.device_recipes import train_ways

    try:
        return train_ways(device)
    except ModuleNotFoundError as error:
        raise NotHere(f"{error.name} is not installed") from None


PARTS: dict[str, Callable[[torch.device], Figures]] = {
    "parity": parity,
    "out_of_memory": out_of_memory,
    "probe_values": probe_values,
    "varying_lengths": varying_lengths,
    "offload_stress": offload_stress,
    "idle_overhead": idle_overhead,
    "compiled_units": compiled_units,
    "quantized": quantized,
    "device_threads": device_threads,
    "predictions": predictions,
    "recipes": recipes,
}
"""Every part by its name."""


def _microseconds(fn: Callable[[], object], number: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(number):
        fn()
    return (time.perf_counter() - start) / number * 1e6

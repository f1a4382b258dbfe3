"""Measures the local CPU: how fast one thread multiplies, moves bytes, and runs Python.

By the time of the thread, not of the clock, so that other programs do not count. Done once for a
CPU and a version of torch, and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rematic.cost.devices import Device
from rematic.cost.host_seconds import measure_host_seconds

MATRIX_SIZE = 768
"""Rows and columns of the matrices that are multiplied."""

COPIED_BYTES = 64 * 2**20
"""Bytes of a tensor that is copied, more than caches hold."""

REPEATS = 5

FIGURES = ("float32", "bfloat16", "bytes", "replay", "selective")
"""What is measured."""

DISK_BYTES_PER_SECOND = 500e6
"""What moving to disk is reckoned with; not measured."""


def local_cpu() -> Device:
    """Returns the CPU that this runs on, by what one of its threads does.

    Takes about a second the first time. Times are those of one thread; with more of them all ops
    become faster about alike.
    """
    rates = _read() or _measure_and_write()
    return Device(
        name="cpu",
        memory_bytes=None,
        flops_per_second=tuple((dtype, rates[dtype]) for dtype in ("float32", "bfloat16")),
        bytes_per_second=rates["bytes"],
        link_bytes_per_second=DISK_BYTES_PER_SECOND,
        attained_share=1.0,
        replay_seconds=rates["replay"],
        selective_seconds=rates["selective"],
        overlaps_host=False,
        source=f"measured: one thread of {_cpu_name()}, torch {torch.__version__}",
    )


def measure() -> dict[str, float]:
    """Returns what one thread does, by the names of `FIGURES`.

    Operations per second of products by dtype, `bytes` per second of a copy, and seconds of the
    host per `replay` and per `selective` unit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = {
            str(dtype).removeprefix("torch."): _product_rate(dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        source = torch.zeros(COPIED_BYTES // 4)
        target = torch.empty_like(source)
        rates["bytes"] = 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source))
        rates["replay"], rates["selective"] = measure_host_seconds()
    finally:
        torch.set_num_threads(threads)
    return rates


def cache_path() -> Path:
    """Returns the file in which measurements are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "rematic" / "cpu.json"


def _product_rate(dtype: torch.dtype) -> float:
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    return 2 * MATRIX_SIZE**3 / _seconds(lambda: matrix @ matrix)


def _seconds(work: Callable[[], object]) -> float:
    work()  # pages and kernels are there afterwards
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return max(statistics.median(times), 1e-9)


def _read() -> dict[str, float] | None:
    try:
        rates = json.loads(cache_path().read_text("utf-8"))[_key()]
        read = {name: float(rates[name]) for name in FIGURES}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there yet, or no longer readable: measured again
    lowest = {"replay": 0.0, "selective": 0.0}  # seconds, which may be too few to be measured
    is_usable = all(lowest.get(name, 1.0) <= value < math.inf for name, value in read.items())
    return read if is_usable else None


def _measure_and_write() -> dict[str, float]:
    rates = measure()
    path = cache_path()
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(path.read_text("utf-8"))
        known = read if isinstance(read, dict) else {}
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a second each time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**known, _key(): rates}, indent=2), "utf-8")
        partial.replace(path)
    return rates


def _key() -> str:
    return f"{_cpu_name()} | torch {torch.__version__}"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

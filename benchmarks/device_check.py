"""Checks rematic on a CUDA device: bits, real out-of-memory errors, probes, streams, times.

    python benchmarks/device_check.py                      # at most 8 minutes, a JSON line a part
    python benchmarks/device_check.py --parts parity out_of_memory
    python benchmarks/device_check.py --device cpu         # what can run without a GPU

It needs no installation: where rematic is not importable, a tree of links makes it so. Parts run in
the order of their weight and stop being started when the time is up. The exit status is 1 if a part
failed. Where there is no CUDA device it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs the parts that were asked for; returns the exit status."""
    make_importable()
    import torch

    from benchmarks.device_parts import PARTS, NotHere

    arguments = _arguments(list(PARTS))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"part": "start", "skipped": "torch finds no CUDA device"}))
        return 0
    device = torch.device(arguments.device)
    _print(part="start", device=_described(device), torch=torch.__version__)
    began, failed = time.monotonic(), 0
    for name in arguments.parts:
        if time.monotonic() - began > arguments.seconds:
            _print(part=name, skipped=f"not started after {arguments.seconds} s")
            continue
        start = time.monotonic()
        try:
            figures = PARTS[name](device)
        except NotHere as reason:
            figures = {"skipped": str(reason)}
        except Exception as error:  # a broken part must not hide the others
            figures = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        failed += figures.get("ok") is False
        _print(part=name, seconds=round(time.monotonic() - start, 2), **figures)
    return 1 if failed else 0


def make_importable() -> None:
    """Puts the folders of the repository where Python finds them as `rematic`, if need be."""
    sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec("rematic") is not None:
        return
    tree = Path(tempfile.mkdtemp(prefix="rematic-")) / "rematic"
    tree.mkdir()
    for source in [*(ROOT / "plugin").iterdir(), ROOT / "callbacks", ROOT / "recipes"]:
        (tree / source.name).symlink_to(source)
    sys.path.insert(0, str(tree.parent))


def _described(device: Any) -> str:  # noqa: ANN401 - a torch.device, before torch is imported
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _print(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def _arguments(parts: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seconds", type=float, default=420, help="start no part after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Fixtures of the memory tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Child = Callable[..., dict[str, Any]]

BEGINNING = """
import json, sys
import torch
torch.set_num_threads({threads})
from rematic.memory import *

def tell(**values):
    print(json.dumps(values), flush=True)
"""


@pytest.fixture(scope="session")
def child() -> Child:
    """Runs code in a process of its own, since allocator and limits hold for a whole process."""
    return run_child


def run_child(code: str, *, threads: int = 1, seconds: float = 60) -> dict[str, Any]:
    """Returns what the code told; it must tell exactly one thing and end without an error."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING.format(threads=threads) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert done.returncode == 0, f"code {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    told: dict[str, Any] = json.loads(done.stdout)
    return told

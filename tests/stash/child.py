"""Runs lines of Python in a process of its own and returns what they told."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

PREAMBLE = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from rematic.stash import DiskStash, StashError

def tell(**values):
    print(json.dumps(values), flush=True)
"""


def start_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a process that runs the lines after `PREAMBLE`."""
    program = PREAMBLE + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_child(code: str, *arguments: str, returncode: int = 0) -> dict[str, Any]:
    """Runs the lines to their end and returns the last thing they told."""
    process = start_child(code, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == returncode, errors
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told

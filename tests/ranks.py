"""Two ranks over gloo: a module of the tests, run once for each in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def run_ranks(module: str, *, seconds: float) -> list[str]:
    """Runs `python -m MODULE PORT RANK` for ranks 0 and 1 at once; none outlives the call.

    Returns:
        What each printed, in the order of ranks. Both have ended without an error.
    """
    command = [sys.executable, "-m", module, str(free_port())]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs

"""On two ranks the plugin trains as Accelerate does without checkpointing, dropout on."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_ddp_and_fsdp2_end_in_the_weights_of_training_without_checkpointing() -> None:
    """What Accelerate's own wrapper does under FSDP2 is shown beside: it draws dropout anew.

    If that is equal one day, the line that warns of it has to go.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "tests.hosts.accelerate_ranks", str(port)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    last = [output.splitlines()[-1:] for output in outputs]
    assert last == [["equal, stock wrapper not"]] * 2, outputs

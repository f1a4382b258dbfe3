"""DDP sees one gradient for each parameter of a unit without a graph."""

from __future__ import annotations

import socket
import subprocess
import sys


def test_ddp_on_two_ranks_has_the_gradients_of_plain_ddp() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "tests.activations.graphless_ranks", str(port)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [output.splitlines()[-1:] for output in outputs] == [["equal"], ["equal"]], outputs

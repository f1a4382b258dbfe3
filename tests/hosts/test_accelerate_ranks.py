"""On two ranks the plugin trains as Accelerate does without checkpointing, dropout on."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


@pytest.mark.slow
def test_ddp_and_fsdp2_end_in_the_weights_of_training_without_checkpointing() -> None:
    """What Accelerate's own wrapper does under FSDP2 is shown beside: it draws dropout anew.

    If that is equal one day, the line that warns of it has to go.
    """
    outputs = run_ranks("tests.hosts.accelerate_ranks", seconds=240)
    last = [output.splitlines()[-1:] for output in outputs]
    assert last == [["equal, stock wrapper not"]] * 2, outputs

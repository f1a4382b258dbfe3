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
    waiting, failing = (output.splitlines() for output in outputs)
    assert "equal, stock wrapper not" in waiting
    assert "equal, stock wrapper not" in failing
    both_stopped(waiting, failing, reason="its parameters are sharded")


@pytest.mark.slow
def test_one_rank_runs_its_step_again_while_the_other_waits() -> None:
    """Under DDP, with gathers of the Accelerator inside the step, as trainers have them.

    A collective by hand inside the step, which cannot be run again alone, ends both.
    """
    waiting, failing = (
        output.splitlines()
        for output in run_ranks("tests.hosts.accelerate_rank_faults", seconds=240)
    )
    assert "equal" in waiting
    assert "equal" in failing
    both_stopped(waiting, failing, reason="ranks exchanged tensors inside the step (beside the wr")


def both_stopped(waiting: list[str], failing: list[str], *, reason: str) -> None:
    """At once, and not after the half hour of their timeout."""
    assert waiting[-1].startswith("RuntimeError"), waiting
    assert failing[-1].startswith("StepOutOfMemoryError"), failing
    assert reason in failing[-1]
    assert "could not be saved (saving takes all 2 ranks" in failing[-1]

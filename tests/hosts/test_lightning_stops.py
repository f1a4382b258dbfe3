"""A fit that stops for lack of memory leaves a checkpoint from which it can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rematic
from tests.hosts.lightning_fits import Recorded, Runner, loader_of_batches
from tests.hosts.test_lightning_recovery import (
    ENTRIES,
    FAULTS,
    STEP_ALONE,
    FaultyNet,
    NeverFits,
)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_never_fits_leaves_a_checkpoint(runner: Runner, tmp_path: Path, entry: str) -> None:
    """Cases F4 and F9; the fit can go on from it."""
    FAULTS.__init__()
    journal = Recorded()
    arguments = {"recipe": STEP_ALONE, "policy": "keep", "journal": journal}
    trainer = runner.trainer(default_root_dir=tmp_path, **runner.entry(entry, **arguments))
    with pytest.raises(rematic.StepOutOfMemoryError, match="The training was saved to ") as caught:
        runner.fit(NeverFits, trainer=trainer)
    path = tmp_path / "rematic-emergency.ckpt"
    assert caught.value.report.checkpoint == str(path)
    assert len(caught.value.report.attempts) == 4
    (stop,) = [event for event in journal.events if event["event"] == "stop"]
    assert stop["checkpoint"] == str(path)
    resumed = runner.fit(FaultyNet, ckpt_path=path, **runner.entry(entry, policy="keep"))
    assert resumed.trainer.global_step == 14


class StopsLate(FaultyNet):
    """In the third micro-batch of the second update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            raise torch.OutOfMemoryError("injected")
        return output


@pytest.mark.parametrize("entry", ENTRIES)
def test_batches_without_an_update_are_not_in_the_checkpoint(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    FAULTS.__init__()
    arguments = {"recipe": STEP_ALONE, "policy": "keep"}
    trainer = runner.trainer(
        default_root_dir=tmp_path, accumulate_grad_batches=3, **runner.entry(entry, **arguments)
    )
    with pytest.raises(rematic.StepOutOfMemoryError, match="2 micro-batches since") as caught:
        runner.fit(StopsLate, trainer=trainer)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert (progress.current.completed, progress.current.ready) == (5, 6)
    saved = torch.load(caught.value.report.checkpoint, weights_only=True)
    counted = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert (counted["current"]["completed"], counted["total"]["completed"]) == (3, 3)
    assert saved["rematic"]["num_steps"] == 3
    assert saved["state_dict"]["blocks.0.norm.num_batches_tracked"] == 3
    assert trainer.lightning_module.blocks[0].norm.num_batches_tracked == 5


class Stateful(torch.utils.data.DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class BringsData(StopsLate):
    def train_dataloader(self) -> Any:
        return Stateful(loader_of_batches().dataset, batch_size=4)


def test_a_loader_with_a_state_of_its_own_is_told_of(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    FAULTS.__init__()
    with pytest.raises(rematic.StepOutOfMemoryError):
        runner.fit(BringsData, **runner.entry("strategy", recipe=STEP_ALONE, policy="keep"))
    assert "those since the last optimizer step, were taken from it" in caplog.text

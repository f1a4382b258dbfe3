"""A run that stops for lack of memory goes on from where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rematic.journal import read_journal
from rematic.training import trained_module
from rematic.training.run import train
from tests.training.small import tiny

DROPOUT = "model.config.attention_dropout=0.2"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fail_from(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every attempt at the micro-batch `at`, counted from 0, run out of memory."""
    loss_of, done = trained_module.model_loss, [0]

    def fails(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if done[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        done[0] += 1
        return loss_of(model, batch)

    monkeypatch.setattr(trained_module, "model_loss", fails)


def weights(run: str) -> dict[str, torch.Tensor]:
    return dict(torch.load(Path("runs") / run / "last.ckpt", weights_only=True)["state_dict"])


def losses(run: str) -> list[float]:
    text = (Path("runs") / run / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("accumulate", "at"), [(1, 3), (1, 4), (3, 4), (3, 5), (3, 6)], ids=lambda value: str(value)
)
def test_resuming_ends_in_the_same_weights(
    accumulate: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two epochs of four documents, of which the last update of each has one by three."""
    keys = (DROPOUT, "training.epochs=2", f"training.accumulate={accumulate}")
    train(tiny(*keys, "run.name=whole"), show_progress=False)
    with monkeypatch.context() as patched:
        fail_from(at, patched)
        with pytest.raises(RuntimeError, match=r"The training was saved to .*last\.ckpt"):
            train(tiny(*keys, "run.name=parts"), show_progress=False)
    summary = train(tiny(*keys, "run.name=parts"), resume="runs/parts", show_progress=False)
    assert summary.status == "finished"
    assert losses("parts") == losses("whole")
    whole, parts = weights("whole"), weights("parts")
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    events = list(read_journal(Path("runs/parts/journal.jsonl")))
    begun = at - (at % 4) % accumulate
    starts = [e.get("resumed_after_step") for e in events if e["event"] == "run_start"]
    assert starts == [None, begun - 1]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [*range(at), *range(begun, 8)]


def test_a_run_that_stops_in_its_first_update_has_nothing_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_from(1, monkeypatch)
    said = r"The training could not be saved \(nothing was trained since the training began\)"
    with pytest.raises(RuntimeError, match=said):
        train(tiny("training.accumulate=2"), show_progress=False)
    assert not Path("runs/tiny-cpu/last.ckpt").exists()

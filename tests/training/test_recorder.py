from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from rematic.recipes import ModelConfig, TrainingConfig
from rematic.training import trained_module
from rematic.training.checkpoint_file import CheckpointFile
from rematic.training.interrupts import StopRequest
from rematic.training.loader import BatchLoader
from rematic.training.model import build_model
from rematic.training.recorder import RunRecorder
from rematic.training.run_directory import RunDirectory
from rematic.training.trained_module import TrainedModule
from tests.training.small import examples, maker

DOCUMENTS = [[1, 3 + number, 4 + number, 2] for number in range(7)]
MODEL = ModelConfig(
    type="llama",
    config={
        "vocab_size": 259,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    },
)


@dataclass
class Run:
    """One process's part of a run, over the stock strategy."""

    path: Path
    epochs: int = 2
    accumulate: int = 1
    created: bool = True
    every: int | None = None
    stop_after: int | None = None
    error_at: int | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("full"))

    def __post_init__(self) -> None:
        self.events: list[Mapping[str, object]] = []
        self.told: list[str] = []
        self.loader = BatchLoader(examples(DOCUMENTS), maker())
        self.stop = StopRequest()
        training = TrainingConfig(learning_rate=0.01, warmup_steps=3, accumulate=self.accumulate)
        self.module = TrainedModule(build_model(MODEL, max_length=4, seed=0), training=training)
        created = (self.path,) if self.created else ()
        self.directory = RunDirectory(path=self.path, created=created)
        self.recorder = RunRecorder(
            self.directory,
            journal=self,
            loader=self.loader,
            stop=self.stop,
            figures=lambda: None,
            facts=lambda: {"name": "run"},
            checkpoint_every_steps=self.every,
            notify=self.told.append,
        )

    def write(self, event: Mapping[str, object]) -> None:
        self.events.append(event)

    def fit(self, *, resume: bool = False) -> pl.Trainer:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=self.epochs,
            accumulate_grad_batches=self.accumulate,
            callbacks=[Meddler(self), self.recorder],
            plugins=[CheckpointFile()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        path = self.directory.checkpoint if resume else None
        trainer.fit(self.module, train_dataloaders=self.loader, ckpt_path=path)
        return trainer

    @property
    def kinds(self) -> list[object]:
        return [event["event"] for event in self.events]

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])

    @property
    def losses(self) -> list[float]:
        lines = self.directory.metrics.read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


class Meddler(Callback):
    """Presses Ctrl-C after a batch, or fails in one."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_start(self, *args: Any) -> None:
        if self._run.loader.finished == self._run.error_at:
            raise self._run.error

    def on_train_batch_end(self, *args: Any) -> None:
        if self._run.loader.finished + 1 == self._run.stop_after:
            self._run.stop.signal_number = 2


def saved_batches(run: Run) -> int:
    loaded = CheckpointFile().load_checkpoint(run.directory.checkpoint, weights_only=True)
    return int(loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["finished"])


def test_records_a_run_from_start_to_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fit()
    assert run.kinds == ["run_start", "checkpoint", "run_end"]
    assert run.events[-1] == {
        "event": "run_end",
        "status": "finished",
        "reason": None,
        "last_loss": run.losses[-1],
    }
    lines = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    assert [line["batch"] for line in lines] == list(range(1, 15))
    assert [line["epoch"] for line in lines] == [0] * 7 + [1] * 7
    rates = [line["learning_rate"] for line in lines[:5]]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert saved_batches(run) == 14
    assert not run.stop.deferring


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_loss_that_is_no_number_is_told_once(
    tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, epochs=1)
    loss_of = trained_module.model_loss

    def spoiled(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * (1.0 if run.loader.finished < 2 else value)

    monkeypatch.setattr(trained_module, "model_loss", spoiled)
    run.fit()
    (text,) = run.told
    assert text.startswith(f"the loss of batch 3 is {'nan' if math.isnan(value) else 'inf'}; exp")
    (notice,) = [event for event in run.events if event["event"] == "notice"]
    assert (notice["kind"], notice["text"]) == ("loss", text)
    lines = run.directory.metrics.read_text().splitlines()
    losses = [json.loads(line, parse_constant=refuse)["loss"] for line in lines]
    assert [isinstance(loss, float) for loss in losses] == [True, True, *[False] * 5]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("stop_after", [1, 3, 7, 9, 13, 14])
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, stop_after: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Run(tmp_path / "whole")
    whole.fit()
    first = Run(tmp_path / "parts", stop_after=stop_after)
    first.fit()
    assert first.events[-1]["status"] == "interrupted"
    assert saved_batches(first) == stop_after
    second = Run(tmp_path / "parts", created=False)
    second.fit(resume=True)
    assert second.losses == whole.losses
    assert torch.equal(second.weights, whole.weights)
    assert second.loader.finished == 14


@pytest.mark.parametrize("stop_after", [2, 3, 5])
def test_stops_after_an_optimizer_step_only(tmp_path: Path, stop_after: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Run(tmp_path / "whole", accumulate=3)
    whole.fit()
    first = Run(tmp_path / "parts", accumulate=3, stop_after=stop_after)
    first.fit()
    assert saved_batches(first) in (3, 6)
    second = Run(tmp_path / "parts", accumulate=3, created=False)
    second.fit(resume=True)
    assert second.losses == whole.losses
    assert torch.equal(second.weights, whole.weights)


def test_saves_every_so_many_steps_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Run(tmp_path / "whole")
    whole.fit()
    first = Run(tmp_path / "parts", every=2, error_at=5)
    with pytest.raises(RuntimeError, match="full"):
        first.fit()
    assert first.events[-1]["status"] == "failed"
    assert first.events[-1]["reason"] == "full"
    assert saved_batches(first) == 4
    second = Run(tmp_path / "parts", created=False)
    second.fit(resume=True)
    assert second.losses == whole.losses
    assert torch.equal(second.weights, whole.weights)
    metrics = [run.directory.metrics.read_text() for run in (whole, second)]
    assert metrics[0] == metrics[1]


def test_a_finished_run_can_be_given_another_epoch(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Run(tmp_path / "whole")
    whole.fit()
    Run(tmp_path / "parts", epochs=1).fit()
    second = Run(tmp_path / "parts", created=False)
    second.fit(resume=True)
    assert second.losses == whole.losses
    assert torch.equal(second.weights, whole.weights)


@pytest.mark.parametrize(
    ("error", "created", "ends"),
    [
        (ValueError("bad"), True, False),
        (ValueError("bad"), False, True),
        (RuntimeError("full"), True, True),
    ],
    ids=["new and refused", "resumed and refused", "new and failed"],
)
def test_a_run_that_trained_nothing_ends_only_where_it_stays(
    tmp_path: Path, error: BaseException, created: bool, ends: bool
) -> None:
    run = Run(tmp_path, error_at=0, error=error, created=created)
    with pytest.raises(type(error)):
        run.fit()
    assert run.kinds == ["run_start", *(["run_end"] if ends else [])]

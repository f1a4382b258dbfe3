"""A Trainer that stops for lack of memory leaves a checkpoint that ends in the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import Faults, plugin_for
from tests.hosts.trainer_fits import Trained, fit, make

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


class Counting(nn.Module):
    """Dropout, and a statistic that every micro-batch moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_llama("eager", attention_dropout=0.2)
        self.config = self.net.config
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        self.seen.mul_(0.9).add_(0.1 * torch.rand(()))
        return self.net(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


def model() -> nn.Module:
    torch.manual_seed(2)
    return Counting()


OPTIONS: dict[str, Any] = {"max_steps": 9, "save_strategy": "no", "weight_decay": 0.1}
"""Of a training of two epochs: seven updates of three micro-batches are one."""


def stopped(folder: Path, at: int, **options: Any) -> tuple[Trained, Any]:
    """Trains until every attempt at micro-batch `at`, counted from 0, runs out of memory."""
    faults = Faults(loss=set(range(at + 1, at + 5)))
    plugin = plugin_for(policy="keep")
    trained = make(folder, model=model(), faults=faults, plugin=plugin, **{**OPTIONS, **options})
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        trained.trainer.train()
    return trained, caught.value.report


def test_where_it_is_and_what_is_in_it(tmp_path: Path) -> None:
    trained, report = stopped(tmp_path, 7, gradient_accumulation_steps=3, save_only_model=True)
    folder = tmp_path / "rematic-emergency" / "checkpoint-2"
    assert report.checkpoint == str(folder)
    assert report.num_unsaved_steps == 1
    names = {path.name for path in folder.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rematic.json"} <= names
    assert json.loads((folder / "rematic.json").read_text())["num_steps"] == 6
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert trained.trainer.args.save_only_model, "as before"
    assert "_get_output_dir" not in vars(trained.trainer)
    assert trained.trainer._total_train_tokens == 7 * 24, "as before the step"
    assert [path.name for path in tmp_path.iterdir()] == ["rematic-emergency"]


@pytest.mark.parametrize(
    ("accumulate", "at", "with_plugin"),
    [(1, 20, True), (1, 23, True), (3, 8, True), (3, 8, False), (3, 21, True), (3, 22, True)],
)
def test_a_resumed_training_ends_in_the_same_weights(
    tmp_path: Path, accumulate: int, at: int, with_plugin: bool
) -> None:
    """Early and late in a window, and in the first of the second epoch (of 20 micro-batches)."""
    options = {**OPTIONS, "gradient_accumulation_steps": accumulate}
    if accumulate == 1:
        options["max_steps"] = 25
    whole = fit(tmp_path / "whole", model=model(), **options)
    _, report = stopped(tmp_path, at, **options)
    torch.manual_seed(99)
    again = make(
        tmp_path,
        model=model(),
        plugin=plugin_for(policy="keep") if with_plugin else None,
        **options,
    )
    again.trainer.train(resume_from_checkpoint=report.checkpoint)
    mine, theirs = again.model.state_dict(), whole.model.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert again.trainer.state.global_step == options["max_steps"]
    seen = (again.trainer.state.num_input_tokens_seen, whole.trainer.state.num_input_tokens_seen)
    assert seen[0] == seen[1]
    assert again.trainer.state.total_flos == whole.trainer.state.total_flos


def resumed_at(folder: Path) -> int:
    """Where a Trainer begins that is told to resume from whatever there is."""
    begun: list[int] = []
    again = make(folder, model=model(), plugin=plugin_for(policy="keep"), **OPTIONS)
    train = again.trainer._inner_training_loop

    def loop(*args: Any, **kwargs: Any) -> Any:
        begun.append(int(str(kwargs["resume_from_checkpoint"]).rpartition("-")[2]))
        return train(*args, **kwargs)

    again.trainer._inner_training_loop = loop  # type: ignore[method-assign]
    again.trainer.train(resume_from_checkpoint=True)
    return begun[0]


def test_it_is_found_while_it_is_the_newest_and_nothing_prunes_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    stopped(tmp_path, 5, **saving)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "rematic-emergency"]
    assert resumed_at(tmp_path) == 5
    newer = tmp_path / "checkpoint-4" / "trainer_state.json"
    os.utime(newer, (newer.stat().st_mtime + 9,) * 2)
    assert resumed_at(tmp_path) == 4, "saved later, by another run in the same folder"
    assert (tmp_path / "rematic-emergency" / "checkpoint-5").is_dir()


def test_where_there_is_no_other(tmp_path: Path) -> None:
    stopped(tmp_path, 5)
    assert resumed_at(tmp_path) == 5


def test_it_is_told_why_nothing_is_saved(tmp_path: Path) -> None:
    _, report = stopped(tmp_path, 0)
    assert report.checkpoint is None
    assert report.not_saved == "nothing was trained since the training began"
    assert not any(tmp_path.iterdir())


def test_a_smaller_batch_is_no_end(tmp_path: Path) -> None:
    """Memory runs out once more for good, with the smallest one."""
    plugin = plugin_for(policy="keep")
    faults = Faults(loss={3, 4, 5, 6})
    trained = make(
        tmp_path, model=model(), faults=faults, plugin=plugin, auto_find_batch_size=True, **OPTIONS
    )
    trained.trainer.train()
    assert faults.num_fired == 4
    assert not any(tmp_path.iterdir())


def test_a_disk_that_is_full_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.Trainer._save_checkpoint", fails)
    trained, report = stopped(tmp_path, 2)
    assert report.not_saved == "OSError: disk full"
    assert trained.trainer.state.global_step == 2


@pytest.mark.parametrize("at", [4, 7], ids=["at the same update", "at a later one"])
def test_one_that_fails_leaves_the_older_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Neither a mixture of both, nor a part of the new one that hides the old one."""
    folder = tmp_path / "rematic-emergency"
    _, report = stopped(tmp_path, 4)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def fails(*args: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.Trainer._save_optimizer_and_scheduler", fails)
        _, report = stopped(tmp_path, at, learning_rate=0.5)
    assert report.not_saved == "OSError: disk full"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert resumed_at(tmp_path) == 4


def test_as_many_stay_as_of_those_of_the_trainer(tmp_path: Path) -> None:
    for at in (3, 6, 2):
        stopped(tmp_path, at, save_total_limit=2)
    saved = sorted(path.name for path in (tmp_path / "rematic-emergency").iterdir())
    assert saved == ["checkpoint-2", "checkpoint-6"], "the last two"


def test_another_folder(tmp_path: Path) -> None:
    faults = Faults(loss=set(range(3, 7)))
    plugin = plugin_for(policy="keep", emergency_dir=tmp_path / "other")
    with pytest.raises(rematic.StepOutOfMemoryError, match=r"other.checkpoint-2\."):
        fit(tmp_path / "out", model=model(), faults=faults, plugin=plugin, **OPTIONS)


def test_an_evaluation_without_memory_keeps_nothing_alive(tmp_path: Path) -> None:
    """Whoever catches the error tries a smaller batch, with the memory of what failed."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(*_: object) -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("injected")

    trained = make(tmp_path, model=model(), plugin=plugin_for(policy="keep"), **OPTIONS)
    trained.model.register_forward_pre_hook(fails)
    with contextlib.suppress(torch.OutOfMemoryError):
        trained.trainer.evaluate(trained.trainer.train_dataset)
    assert [one() for one in held] == [None]

"""A loop of Accelerate that stops for lack of memory leaves a folder for `load_state`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn

import rematic
from rematic.journal import JournalWriter
from tests.hosts.accelerate_loops import WIDTH, Faults, Net, fresh_accelerator, plugin_for

NUM_BATCHES = 18


class Loop:
    """A loop over eighteen batches that can begin anywhere, with batch norm and dropout."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        accumulate: int = 1,
        inside: bool = False,
        faults: Faults | None = None,
        with_plugin: bool = True,
        naming: bool = False,
        **fields: Any,
    ) -> None:
        self.inside = inside
        self.accelerator = fresh_accelerator(
            gradient_accumulation_steps=accumulate,
            project_config=ProjectConfiguration(
                None if folder is None else str(folder),
                automatic_checkpoint_naming=naming,
                total_limit=1 if naming else None,
            ),
        )
        torch.manual_seed(3)
        self.raw = Net(faults or Faults())
        adam = torch.optim.AdamW(self.raw.parameters(), 1e-2)
        rates = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.9)
        self.plugin = plugin_for(policy="keep", **fields) if with_plugin else None
        if self.plugin is not None:
            self.plugin.attach(self.accelerator)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.raw, adam, rates)

    def run(self, *, start: int = 0, save_at: int | None = None) -> Loop:
        def forward_backward(batch: tuple[Tensor, Tensor]) -> None:
            x, y = batch
            self.accelerator.backward((self.model(x) - y).square().mean())

        def accumulated(batch: tuple[Tensor, Tensor]) -> None:
            with self.accelerator.accumulate(self.model):
                forward_backward(batch)

        fn = accumulated if self.inside else forward_backward
        step = fn if self.plugin is None else self.plugin.step(fn)
        for number in range(start, NUM_BATCHES):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            batch = (x, x[:, :1].sin())
            if self.inside:
                step(batch)
            else:
                with self.accelerator.accumulate(self.model):
                    step(batch)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if number == save_at:
                self.accelerator.save_state()
        return self

    def is_same_as(self, other: Loop) -> None:
        mine, theirs = self.raw.state_dict(), other.raw.state_dict()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
        assert self.schedule.get_last_lr() == other.schedule.get_last_lr()


def stopped(loop: Loop, **options: Any) -> Any:
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        loop.run(**options)
    return caught.value.report


def faults_at(number: int) -> Faults:
    """Every attempt at that micro-batch, counted from 0, runs out of memory."""
    return Faults(forward=set(range(number + 1, number + 5)))


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize(("accumulate", "at"), [(1, 7), (3, 6), (3, 8)])
@pytest.mark.parametrize("with_plugin", [True, False], ids=["rematic", "stock"])
def test_a_resumed_loop_ends_in_the_same_weights(
    tmp_path: Path, accumulate: int, at: int, inside: bool, with_plugin: bool
) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "inside": inside}
    whole = Loop(**options).run()
    loop = Loop(tmp_path, faults=faults_at(at), **options)
    report = stopped(loop)
    begun = at - at % accumulate
    assert report.checkpoint == str(tmp_path / "rematic-emergency")
    assert report.num_unsaved_steps == at % accumulate
    assert loop.plugin is not None
    assert loop.plugin.session is not None
    assert loop.plugin.session.num_steps == at, "as before the step"
    again = Loop(with_plugin=with_plugin, **options)
    again.accelerator.load_state(report.checkpoint)
    assert again.accelerator.step == begun
    if again.plugin is not None:
        assert again.plugin.session is not None
        assert again.plugin.session.num_steps == begun
    again.run(start=begun).is_same_as(whole)


def test_a_loop_that_was_resumed_can_stop_again(tmp_path: Path) -> None:
    """In the window in which it has begun, and before it has trained anything new."""
    whole = Loop(accumulate=3).run()
    stopped(Loop(tmp_path, accumulate=3, faults=faults_at(7)))
    again = Loop(tmp_path / "again", accumulate=3, faults=faults_at(1))
    again.accelerator.load_state(tmp_path / "rematic-emergency")
    report = stopped(again, start=6)
    assert report.not_saved == "nothing was trained since the training began"
    third = Loop(tmp_path / "again", accumulate=3, faults=faults_at(4))
    third.accelerator.load_state(tmp_path / "rematic-emergency")
    report = stopped(third, start=6)
    last = Loop(accumulate=3)
    last.accelerator.load_state(report.checkpoint)
    assert last.accelerator.step == 9
    last.run(start=9).is_same_as(whole)


def test_names_and_limits_of_the_accelerator_do_not_touch_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, naming=True, faults=faults_at(5))
    report = stopped(loop, save_at=3)
    assert report.checkpoint == str(tmp_path / "rematic-emergency")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    configuration = loop.accelerator.project_configuration
    assert (configuration.automatic_checkpoint_naming, configuration.iteration) == (True, 1)
    assert loop.accelerator.step == 6


@pytest.mark.parametrize("where", ["field", "journal", "working folder"])
def test_where_it_is_saved_without_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "here"
    folder.mkdir()
    fields: dict[str, Any] = {}
    if where == "field":
        fields["emergency_dir"] = folder / "rematic-emergency"
    elif where == "journal":
        fields["journal"] = JournalWriter(folder / "journal.jsonl")
    report = stopped(Loop(faults=faults_at(2), **fields))
    if where == "journal":
        fields["journal"].close()
    place = Path("rematic-emergency") if where == "working folder" else folder / "rematic-emergency"
    assert report.checkpoint == str(place)
    assert json.loads((place / "rematic.json").read_text())["num_steps"] == 2


def test_an_older_one_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(Loop(tmp_path, faults=faults_at(2)))
    before = (tmp_path / "rematic-emergency" / "model.safetensors").read_bytes()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("accelerate.accelerator.save_accelerator_state", fails)
    report = stopped(Loop(tmp_path, faults=faults_at(4)))
    assert report.not_saved == "OSError: disk full"
    assert [path.name for path in tmp_path.iterdir()] == ["rematic-emergency"]
    assert (tmp_path / "rematic-emergency" / "model.safetensors").read_bytes() == before


def test_several_ranks_are_told_why_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, faults=faults_at(2))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    report = stopped(loop)
    assert report.checkpoint is None
    assert report.not_saved.startswith("saving takes all 2 ranks, and the others have not stopped")
    assert not any(tmp_path.iterdir())


class Replacing(nn.Module):
    """A statistic that each micro-batch replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        if self.seen > 4.5:
            raise torch.OutOfMemoryError("injected")
        for block in self.blocks:
            x = block(x)
        return x


def test_buffers_that_are_exchanged_are_put_back_too(tmp_path: Path) -> None:
    accelerator = fresh_accelerator()
    plugin = plugin_for(policy="keep", emergency_dir=tmp_path / "saved").attach(accelerator)
    net = Replacing()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    step = plugin.step(lambda x: accelerator.backward(model(x).sum()))
    for number in range(4):
        step(torch.ones(2, 4))
        if number == 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(rematic.StepOutOfMemoryError):
        step(torch.ones(2, 4))
    assert net.seen == 4, "as before the step"
    accelerator.load_state(tmp_path / "saved")
    assert net.seen == 3, "as behind the last update"

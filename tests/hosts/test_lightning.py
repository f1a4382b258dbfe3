"""The strategy: which device, which Trainer, when it attaches, and what it leaves behind."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

import rematic
import rematic.callbacks
from rematic.recipes import ControlConfig, Recipe
from tests.hosts.lightning_fits import (
    Net,
    Recorded,
    Runner,
    ValidatedNet,
    attributes_of,
    session_of,
)

ENTRIES = ("strategy", "callback")
ROOMY = "64GiB"


def test_several_devices_are_refused_with_what_to_use(runner: Runner) -> None:
    with pytest.raises(ValueError, match="one device, but the Trainer has cpu, cpu") as error:
        runner.trainer(devices=2, strategy=rematic.RecomputeStrategy(budget=ROOMY))
    assert "expected Trainer(devices=1)" in str(error.value)
    assert "take rematic.RecomputeDDPStrategy(...) (by name 'recompute_ddp')" in str(error.value)


def test_several_nodes_are_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match=r"has 2 nodes: expected Trainer\(num_nodes=1\)"):
        runner.trainer(num_nodes=2, strategy="recompute")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_key_without_effect_is_told(runner: Runner, entry: str) -> None:
    recipe = Recipe(control=ControlConfig(allow_split=True))
    with pytest.warns(UserWarning, match=r"control\.allow_split has no effect here: it needs"):
        runner.fit(**runner.entry(entry, recipe=recipe, policy="recompute", budget=ROOMY))


def test_the_device_is_the_trainers(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: devices))
    trainer = runner.trainer(accelerator="cuda", devices=[3], strategy="recompute")
    assert trainer.strategy.root_device == torch.device("cuda:3")
    assert trainer.device_ids == [3]


def test_the_command_line_finds_no_device_to_give() -> None:
    parameters = inspect.signature(rematic.RecomputeStrategy).parameters
    assert "device" not in parameters
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_what_every_strategy_takes_is_taken(runner: Runner) -> None:
    precision, checkpoint_io = MixedPrecision("bf16-mixed", "cpu"), TorchCheckpointIO()
    strategy = rematic.RecomputeStrategy(
        policy="recompute", precision_plugin=precision, checkpoint_io=checkpoint_io
    )
    fitted = runner.fit(strategy=strategy)
    assert fitted.trainer.precision_plugin is precision
    assert fitted.trainer.strategy.checkpoint_io is checkpoint_io
    fitted.is_same_as(runner.fit(precision="bf16"))


def test_no_budget_on_a_cpu_is_refused_and_nothing_is_left(runner: Runner) -> None:
    module = Net()
    before = attributes_of(module)
    with pytest.raises(ValueError, match="no budget for a model on the CPU"):
        runner.fit(module, strategy="recompute")
    assert attributes_of(module) == before


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_journal_holds_every_micro_batch(runner: Runner, entry: str) -> None:
    journal = Recorded()
    runner.fit(**runner.entry(entry, policy="recompute", budget=ROOMY, journal=journal))
    steps = [event for event in journal.events if event["event"] == "step"]
    assert journal.events[0]["units"] == [f"blocks.{i}" for i in range(4)]
    assert [step["step"] for step in steps] == list(range(14))
    assert [step["batch"] for step in steps] == 2 * [4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_shape_is_read_as_the_user_says(runner: Runner, entry: str) -> None:
    journal = Recorded()

    def batch_shape(batch: Any) -> rematic.BatchShape:
        return rematic.BatchShape(batch=1, length=100 * len(batch[0]), padded=True)

    runner.fit(
        **runner.entry(entry, policy="keep", journal=journal, batch_shape=batch_shape),
    )
    lengths = [event["length"] for event in journal.events if event["event"] == "step"]
    assert lengths == 2 * [400, 400, 400, 400, 400, 400, 200]


@pytest.mark.parametrize("entry", ENTRIES)
def test_validating_does_not_attach(runner: Runner, entry: str) -> None:
    trainer = runner.trainer(**runner.entry(entry, budget=ROOMY))
    module = ValidatedNet()
    trainer.validate(module, torch.utils.data.DataLoader([(torch.ones(16), torch.ones(1))]))
    assert sum(len(block.calls.replays) for block in module.blocks) == 4
    assert session_of(trainer) is None


def test_fast_dev_run(runner: Runner) -> None:
    fitted = runner.fit(
        fast_dev_run=True, **runner.entry("strategy", policy="recompute", budget=ROOMY)
    )
    assert fitted.session.num_steps == 1


class Copies(Callback):
    """Copies, pickles and saves the module while it is attached."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.copies = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module.blocks))]
        self.log = pl_module.__dict__["log"]
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "mid.ckpt")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_copy_of_an_attached_module_is_plain(runner: Runner, entry: str) -> None:
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    copies = Copies()
    arguments["callbacks"] = [copies, *arguments.get("callbacks", ())]
    fitted = runner.fit(**arguments)
    copied = copies.copies[0]
    assert copied.__dict__["log"].__self__ is copied
    assert type(copied.__dict__["log"]) is not type(copies.log)
    x = torch.randn(4, 16)
    num_steps = fitted.module.blocks[0].calls.count(replays=False)
    copied(x).sum().backward()
    assert copied.blocks[0].calls.count(replays=True) <= num_steps  # nothing replays any more
    assert copied.blocks[0].calls.replays[-1] is False
    assert copies.copies[1][0].forward.__self__ is copies.copies[1][0]


class Observed(nn.Module):
    """A block that logs and counts: through the module it belongs to, and in metrics of its own."""

    def __init__(self, block: nn.Module, owner: pl.LightningModule) -> None:
        super().__init__()
        self.block, self.owner = block, [owner]
        self.mean, self.all, self.num_calls = MeanMetric(), CatMetric(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.owner[0].log("inside", x.mean(), on_step=True, on_epoch=True)
        self.mean.update(x.detach().mean())
        self.all.update(x.detach().mean())
        return torch.sigmoid(self.block(x))


class ObservedNet(Net):
    """Logs what its blocks have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Observed(block, self) for block in self.blocks)

    def on_train_epoch_end(self) -> None:
        for i, block in enumerate(self.blocks):
            self.log(f"mean_{i}", block.mean.compute())
            self.log(f"all_{i}", block.all.compute().sum())
            self.log(f"num_{i}", float(block.num_calls))


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_block_logs_and_counts_is_counted_once(runner: Runner, entry: str) -> None:
    reference = runner.fit(ObservedNet)
    fitted = runner.fit(ObservedNet, **runner.entry(entry, policy="recompute", budget=ROOMY))
    fitted.is_same_as(reference)
    assert fitted.trainer.callback_metrics["num_0"] == 14
    assert fitted.module.blocks[0].block.calls.count(replays=True) == 14


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_step_without_a_loss_ends_at_once(runner: Runner, entry: str) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else output

    reference = runner.fit(Skips)
    fitted = runner.fit(Skips, **runner.entry(entry, policy="recompute", budget=ROOMY))
    fitted.is_same_as(reference)
    assert fitted.session.num_steps == 14


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`"
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_step_that_fetches_its_batch_is_warned_of(runner: Runner, entry: str) -> None:
    class Fetches(Net):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            (x, y), _, _ = next(dataloader_iter)
            return ((self(x) - y) ** 2).mean()

    reference = runner.fit(Fetches)
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    with pytest.warns(UserWarning, match="every batch counts as one token"):
        fitted = runner.fit(Fetches, **arguments)
    fitted.is_same_as(reference)
    assert fitted.session.last_step.tokens == 1


class Exchanges(Callback):
    """Gives the strategy another optimizer in the middle of a fit."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.first = trainer.optimizers[0]
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), 1e-2)]
            trainer.strategy.lr_scheduler_configs = []


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_exchanged_optimizer_marks_boundaries(runner: Runner, entry: str) -> None:
    exchanges = Exchanges()
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    arguments["callbacks"] = [exchanges, *arguments.get("callbacks", ())]
    fitted = runner.fit(**arguments)
    fitted.is_same_as(runner.fit(callbacks=[Exchanges()]))
    fitted.session.switch("keep")
    assert fitted.session.policy.name == "keep"  # the last step ended at a boundary
    assert "step" not in vars(fitted.trainer.optimizers[0])

"""The strategy: which device, which Trainer, when it attaches, and what it leaves behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

import rematic
import rematic.callbacks
from tests.hosts.lightning_fits import Net, Runner, ValidatedNet

ENTRIES = ("strategy", "callback")
ROOMY = "64GiB"


def test_several_devices_are_refused_with_what_to_use(runner: Runner) -> None:
    with pytest.raises(ValueError, match="one device, but the Trainer has cpu, cpu") as error:
        runner.trainer(devices=2, strategy=rematic.RecomputeStrategy(budget=ROOMY))
    assert "expected Trainer(devices=1)" in str(error.value)
    assert "Trainer(strategy='ddp', callbacks=[rematic.callbacks.AdaptiveRe" in str(error.value)
    assert "RecomputeDDPStrategy" in str(error.value)


def test_several_nodes_are_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match=r"has 2 nodes: expected Trainer\(num_nodes=1\)"):
        runner.trainer(num_nodes=2, strategy="recompute")


def test_the_device_is_the_trainers(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: devices))
    trainer = runner.trainer(accelerator="cuda", devices=[3], strategy="recompute")
    assert trainer.strategy.root_device == torch.device("cuda:3")
    assert trainer.device_ids == [3]


def test_a_device_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cuda:1' was given to RecomputeStrategy") as error:
        rematic.RecomputeStrategy(device="cuda:1")
    assert "Trainer(accelerator=..., devices=[index])" in str(error.value)


def test_no_budget_on_a_cpu_is_refused_and_nothing_is_left(runner: Runner) -> None:
    module = Net()
    before = _attributes(module)
    with pytest.raises(ValueError, match="no budget for a model on the CPU"):
        runner.fit(module, strategy="recompute")
    assert _attributes(module) == before


class Recorded:
    """A journal in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Any) -> None:
        self.events.append(dict(event))


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


class Fails(Callback):
    """Raises at the third batch, in one of the places where that can happen."""

    def __init__(self, error: BaseException, hook: str) -> None:
        self.error, self.num_calls = error, 0
        setattr(self, hook, self.hook)

    def hook(self, *args: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 3:
            raise self.error


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(RuntimeError("no"), RuntimeError, id="an error"),
        pytest.param(KeyboardInterrupt(), SystemExit, id="Ctrl-C"),
    ],
)
@pytest.mark.parametrize(
    "hook", ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"]
)
def test_an_exception_leaves_all_plain(
    runner: Runner, entry: str, error: BaseException, raised: type[Any], hook: str
) -> None:
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    arguments["callbacks"] = [Fails(error, hook), *arguments.get("callbacks", ())]
    module, trainer = Net(), runner.trainer(**arguments)
    before = _attributes(module)
    with pytest.raises(raised):
        runner.fit(module, trainer=trainer)
    assert _attributes(module) == before
    assert not {"training_step", "backward"} & set(vars(trainer.strategy))


class FailsAt(pl.LightningModule):
    """Mixed into a net: raises in the training step of one batch."""

    error: BaseException | None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.error is not None:
            raise self.error
        return output


@pytest.mark.parametrize("entry", ENTRIES)
def test_out_of_memory_ends_the_fit_and_is_in_the_journal(runner: Runner, entry: str) -> None:
    module, journal = type("Failing", (FailsAt, Net), {})(), Recorded()
    module.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    before = _attributes(module)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        runner.fit(module, **runner.entry(entry, policy="recompute", journal=journal))
    assert _attributes(module) == before
    assert [event["event"] for event in journal.events] == ["attach", "step", "step", "stop"]
    assert "Tried to allocate 20.00 GiB" in journal.events[-1]["report"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_second_fit_of_the_same_model_works(runner: Runner, entry: str) -> None:
    plain_trainer, plain_module = runner.trainer(), Net()
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    trainer, module = runner.trainer(**arguments), Net()
    module.load_state_dict(plain_module.state_dict())
    sessions = []
    for max_epochs in (2, 3):
        plain_trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs = max_epochs
        reference = runner.fit(plain_module, trainer=plain_trainer)
        fitted = runner.fit(module, trainer=trainer)
        fitted.is_same_as(reference)
        sessions.append(fitted.session)
    assert [session.num_steps for session in sessions] == [14, 7]
    assert sessions[0] is not sessions[1]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_plain_trainer_takes_the_model_over(runner: Runner, entry: str) -> None:
    module, copied = Net(), Net()
    copied.load_state_dict(module.state_dict())
    runner.fit(module, **runner.entry(entry, policy="recompute", budget=ROOMY))
    runner.fit(copied)
    runner.fit(module).is_same_as(runner.fit(copied))


@pytest.mark.parametrize("entry", ENTRIES)
def test_validating_does_not_attach(runner: Runner, entry: str) -> None:
    trainer = runner.trainer(**runner.entry(entry, budget=ROOMY))
    module = ValidatedNet()
    trainer.validate(module, torch.utils.data.DataLoader([(torch.ones(16), torch.ones(1))]))
    assert sum(len(block.calls.replays) for block in module.blocks) == 4
    part = next(c for c in (trainer.strategy, *trainer.callbacks) if hasattr(c, "session"))
    assert part.session is None


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


def _attributes(module: nn.Module) -> dict[str, set[str]]:
    # `_hparams` is Lightning's own
    return {name: set(vars(part)) - {"_hparams"} for name, part in module.named_modules()}

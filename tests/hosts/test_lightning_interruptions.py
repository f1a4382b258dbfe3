"""Fits that end early leave everything plain, and another fit can follow."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.hosts.lightning_fits import Net, Recorded, Runner, attributes_of

ENTRIES = ("strategy", "callback")
ROOMY = "64GiB"


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
    before = attributes_of(module)
    with pytest.raises(raised):
        runner.fit(module, trainer=trainer)
    assert attributes_of(module) == before
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
    before = attributes_of(module)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        runner.fit(module, **runner.entry(entry, policy="recompute", journal=journal))
    assert attributes_of(module) == before
    kinds = [event["event"] for event in journal.events if event["event"] != "control"]
    assert kinds == ["attach", "step", "step", "retry", "retry", "retry", "stop"]
    assert "Tried to allocate 20.00 GiB" in journal.events[-1]["report"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_out_of_memory_between_forward_and_backward_is_in_the_journal(
    runner: Runner, entry: str
) -> None:
    journal, error = Recorded(), torch.OutOfMemoryError("CUDA out of memory.")
    arguments = runner.entry(entry, policy="recompute", journal=journal)
    arguments["callbacks"] = [Fails(error, "on_before_zero_grad"), *arguments.get("callbacks", ())]
    with pytest.raises(torch.OutOfMemoryError):
        runner.fit(**arguments)
    kinds = [event["event"] for event in journal.events if event["event"] != "control"]
    assert kinds == ["attach", "step", "step", "stop"]


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

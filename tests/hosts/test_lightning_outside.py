"""Memory that runs out in a fit outside of `training_step` and of backward itself."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import rematic
from rematic.memory import SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe
from tests.hosts.lightning_fits import Net, Recorded, Runner
from tests.hosts.test_lightning_recovery import ENTRIES, STEP_ALONE

ALWAYS = Recipe(policy=PolicyConfig(op_retry="always", trust=("*",)))
FAILING_BATCH = 5


class Fails(pl.Callback):
    """Runs out of memory in a hook of the sixth batch, and notes how updates began."""

    def __init__(self, hook: str, batch: int = FAILING_BATCH) -> None:
        self.began: dict[int, dict[str, torch.Tensor]] = {}
        self.state: dict[str, torch.Tensor] = {}
        self._batch = -1

        def fails(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if self._batch == batch:
                raise torch.OutOfMemoryError("injected")

        if hook != "on_train_batch_start":
            setattr(self, hook, fails)
        self._fails_at_once = hook == "on_train_batch_start"

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, number: int
    ) -> None:
        self._batch = number
        state = pl_module.state_dict()
        if number % trainer.accumulate_grad_batches == 0:
            self.began[number] = {k: v.clone() for k, v in state.items()}
        self.state = {k: v.clone() for k, v in state.items()}
        if self._fails_at_once and number == FAILING_BATCH:
            raise torch.OutOfMemoryError("injected")


def run(runner: Runner, fails: Fails, entry: str, accumulate: int, module: Any = Net) -> Any:
    """Returns the error, the stop in the journal, and the Trainer."""
    journal = Recorded()
    made = runner.entry(entry, recipe=STEP_ALONE, policy="keep", journal=journal)
    made["callbacks"] = [fails, *made.get("callbacks", ())]
    trainer = runner.trainer(accumulate_grad_batches=accumulate, **made)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        runner.fit(module, trainer=trainer)
    (stop,) = [event for event in journal.events if event["event"] == "stop"]
    return caught.value, stop, trainer


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_zero_grad",
        "on_before_optimizer_step",
    ],
)
def test_a_hook_before_the_update_ends_with_a_checkpoint(
    runner: Runner, tmp_path: Path, hook: str, accumulate: int, entry: str
) -> None:
    batch = FAILING_BATCH if hook != "on_before_zero_grad" or accumulate == 1 else 3
    fails = Fails(hook, batch)
    error, stop, trainer = run(runner, fails, entry, accumulate)
    path = tmp_path / "rematic-emergency.ckpt"
    assert stop["checkpoint"] == str(path)
    assert "it lies outside of forward, loss and backward" in stop["report"]
    assert "take fewer in a batch" not in stop["report"], "no batch is at fault"
    if hasattr(error, "__notes__"):
        assert error.__notes__ == [stop["report"]]
    began = batch - batch % accumulate
    saved = torch.load(path, weights_only=True)
    wanted = fails.began[began]
    assert [k for k, v in saved["state_dict"].items() if not torch.equal(v, wanted[k])] == []
    counted = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert set(counted.values()) == {began}
    assert saved["rematic"]["num_steps"] == began
    assert stop["num_unsaved_steps"] == batch % accumulate + (hook == "on_before_optimizer_step")
    now = trainer.lightning_module.state_dict()
    if hook != "on_before_optimizer_step":  # whose micro-batch has ended
        assert all(torch.equal(now[k], v) for k, v in fails.state.items())
    assert trainer.lightning_module.__dict__.get("configure_gradient_clipping") is None


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_hook_behind_the_update_leaves_nothing_half_done(
    runner: Runner, tmp_path: Path, accumulate: int, entry: str
) -> None:
    """An average of weights, say, may be half made."""
    error, stop, _ = run(runner, Fails("on_train_batch_end"), entry, accumulate)
    assert isinstance(error, torch.OutOfMemoryError)
    assert stop["checkpoint"] is None
    assert stop["not_saved"].startswith("the optimizer has stepped, and what comes behind")
    assert not (tmp_path / "rematic-emergency.ckpt").exists()


def test_a_hook_behind_a_batch_without_an_update(runner: Runner, tmp_path: Path) -> None:
    fails = Fails("on_train_batch_end", 4)
    _, stop, _ = run(runner, fails, "strategy", 3)
    saved = torch.load(stop["checkpoint"], weights_only=True)
    counted = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert (set(counted.values()), stop["num_unsaved_steps"]) == ({3}, 2)
    assert torch.equal(
        saved["state_dict"]["blocks.0.norm.running_mean"],
        fails.began[3]["blocks.0.norm.running_mean"],
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_stop_keeps_nothing_of_the_error_alive(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(*_: Any) -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("injected")

    callback = pl.Callback()
    callback.on_after_backward = fails  # type: ignore[method-assign]
    made = runner.entry(entry, recipe=STEP_ALONE, policy="keep")
    trainer = runner.trainer(**{**made, "callbacks": [callback, *made.get("callbacks", ())]})
    with contextlib.suppress(torch.OutOfMemoryError):
        runner.fit(Net, trainer=trainer)
    gc.collect()
    assert [one() for one in held] == [None]
    assert not (tmp_path / "rematic-emergency.ckpt").exists(), "no optimizer has stepped"


class FailsOnce(pl.Callback):
    """Lets one op of the third call of a method run out of memory, under the retry at the op."""

    def __init__(self, method: str, at: int) -> None:
        self.probe = SimulatedProbe(fail_at_ops=[at])
        self._method, self._num_calls = method, 0
        self._owner: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._owner = scaler if self._method == "unscale_" else pl_module
        self._owner.__dict__[self._method] = self._call(getattr(self._owner, self._method))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        del self._owner.__dict__[self._method]

    def _call(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            if self._num_calls != 3:
                return method(*args, **kwargs)
            with self.probe:
                return method(*args, **kwargs)

        return call


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("precision", "method", "ops"),
    [
        ("fp32", "configure_gradient_clipping", (1, 4, 8)),
        ("fp16", "configure_gradient_clipping", (2, 7)),
        ("fp16", "unscale_", (1, 2, 3)),
    ],
)
def test_clipping_and_unscaling_go_on(
    runner: Runner, precision: str, method: str, ops: tuple[int, ...], entry: str
) -> None:
    options = {"precision": precision, "gradient_clip_val": 0.1, "max_epochs": 1}
    plain = runner.fit(Net, **options)
    for at in ops:
        fails = FailsOnce(method, at)
        made = runner.entry(entry, policy="keep", recipe=ALWAYS)
        made["callbacks"] = [*made.get("callbacks", ()), fails]
        runner.fit(Net, **options, **made).is_same_as(plain)
        assert fails.probe.num_ooms == 1


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("precision", "method"), [("fp32", "configure_gradient_clipping"), ("fp16", "unscale_")]
)
def test_clipping_and_unscaling_that_cannot_go_on_leave_a_checkpoint(
    runner: Runner, precision: str, method: str, entry: str
) -> None:
    fails = FailsOnce(method, 2)
    made = runner.entry(entry, policy="keep", recipe=STEP_ALONE)
    made["callbacks"] = [*made.get("callbacks", ()), fails]
    with pytest.raises(
        rematic.StepOutOfMemoryError, match="Tried: clipping or unscaling"
    ) as caught:
        runner.fit(Net, precision=precision, gradient_clip_val=0.1, **made)
    assert caught.value.report.num_unsaved_steps == 1
    saved = torch.load(caught.value.report.checkpoint, weights_only=True)
    counted = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert set(counted.values()) == {2}
    assert saved["state_dict"]["blocks.0.norm.num_batches_tracked"] == 2

"""Memory that runs out where an Accelerator clips or unscales gradients, and between updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import rematic
from rematic.memory import MemorySnapshot, SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe
from rematic.update_cover import UpdateCover
from tests.hosts.accelerate_loops import plugin_for
from tests.hosts.test_emergency_accelerate import Loop
from tests.hosts.test_emergency_trainer import OPTIONS, model
from tests.hosts.trainer_fits import Trained, fit, make

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
ALWAYS = Recipe(policy=PolicyConfig(op_retry="always", trust=("*",)))


class FailsAt:
    """Lets an op of one call of a method run out of memory, under the retry at the op."""

    def __init__(self, owner: Any, name: str, *, call: int, at: int) -> None:
        self.probe = SimulatedProbe(fail_at_ops=[at])
        self._method, self._call, self._num_calls = getattr(owner, name), call, 0
        owner.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        if self._num_calls != self._call:
            return self._method(*args, **kwargs)
        with self.probe:
            return self._method(*args, **kwargs)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_goes_on(accumulate: int) -> None:
    plain = Loop(accumulate=accumulate).run()
    for at in (1, 4, 7):
        loop = Loop(accumulate=accumulate, recipe=ALWAYS)
        fails = FailsAt(loop.accelerator, "clip_grad_norm_", call=3, at=at)
        loop.run().is_same_as(plain)
        assert fails.probe.num_ooms == 1


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "unscale_gradients"])
def test_each_of_the_methods_is_covered_and_given_back(name: str) -> None:
    loop = Loop(recipe=ALWAYS)
    assert loop.plugin is not None
    session = loop.plugin.session
    assert session is not None
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls: list[int] = []
    session.run_on_gradients = lambda work: calls.append(1) or work()
    arguments = () if name == "unscale_gradients" else (loop.model.parameters(), 1.0)
    getattr(loop.accelerator, name)(*arguments)
    assert calls[:1] == [1]
    loop.plugin.detach()
    assert name not in vars(loop.accelerator)


@pytest.mark.parametrize(
    ("owner", "method", "call", "at", "named"),
    [
        ("accelerator", "clip_grad_norm_", 3, 4, "clipping or unscaling"),
        ("optimizer", "step", 9, 1, "the optimizer's step"),
    ],
)
def test_an_update_that_cannot_go_on_leaves_a_checkpoint(
    tmp_path: Path, owner: str, method: str, call: int, at: int, named: str
) -> None:
    whole = Loop(accumulate=3).run()
    loop = Loop(tmp_path, accumulate=3)
    FailsAt(getattr(loop, owner), method, call=call, at=at)
    said = rf"Tried: {named} .* 3 micro-batches since then come again"
    with pytest.raises(rematic.StepOutOfMemoryError, match=said) as caught:
        loop.run()
    assert caught.value.report.checkpoint == str(tmp_path / "rematic-emergency")
    again = Loop(accumulate=3)
    again.accelerator.load_state(caught.value.report.checkpoint)
    assert again.accelerator.step == 6
    again.run(start=6).is_same_as(whole)


def test_an_optimizer_that_is_torn_leaves_none(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulate=3)
    FailsAt(loop.optimizer, "step", call=9, at=12)
    with pytest.raises(rematic.TornOptimizerStepError):
        loop.run()
    assert not any(tmp_path.iterdir())


def test_clipping_inside_of_a_step_runs_again_with_the_step() -> None:
    loop = Loop()
    FailsAt(loop.accelerator, "clip_grad_norm_", call=1, at=2)
    assert loop.plugin is not None

    @loop.plugin.step
    def step(x: torch.Tensor) -> None:
        loop.accelerator.backward(loop.model(x).sum())
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)

    step(torch.ones(2, 16))
    assert loop.plugin.session is not None
    assert loop.plugin.session.last_step is not None
    assert loop.plugin.session.last_step.step_retries == 1


class Roomy:
    """Says how much is in use."""

    kind = "cuda"

    def __init__(self, in_use_bytes: int) -> None:
        self._in_use_bytes = in_use_bytes

    def allocated_bytes(self) -> int:
        return self._in_use_bytes

    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(allocated_bytes=self._in_use_bytes, capacity_bytes=1 << 30)


@pytest.mark.parametrize(
    ("in_use_bytes", "op_retry", "covered"),
    [
        (1 << 20, "auto", False),
        ((1 << 30) - 1000, "auto", True),
        (1 << 20, "always", True),
        ((1 << 30) - 1000, "never", False),
    ],
)
def test_ops_are_covered_where_there_is_no_room_to_spare(
    in_use_bytes: int, op_retry: Any, covered: bool
) -> None:
    recipe = Recipe(policy=PolicyConfig(op_retry=op_retry, trust=("*",)))
    loop = Loop(recipe=recipe, probe=Roomy(in_use_bytes))
    modes: list[int] = []
    assert loop.plugin is not None
    session = loop.plugin.session
    assert session is not None
    cover = UpdateCover(session)
    step = loop.plugin.step(lambda x: loop.accelerator.backward(loop.model(x).sum()))
    step(torch.ones(2, 16))
    cover.run(lambda: modes.append(torch._C._len_torch_dispatch_stack()))
    assert modes == [int(covered)]


def test_norms_of_shards_are_not_exchanged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(recipe=ALWAYS)
    assert loop.plugin is not None
    assert loop.plugin.session is not None
    cover = UpdateCover(loop.plugin.session)
    modes = [cover.run(torch._C._len_torch_dispatch_stack)]
    monkeypatch.setattr("rematic.update_cover.sharding_obstacle", lambda model: "it is sharded")
    modes.append(cover.run(torch._C._len_torch_dispatch_stack))
    assert modes == [1, 0]


class FailsOn(TrainerCallback):
    """Runs out of memory in a hook of the third update."""

    def __init__(self, hook: str) -> None:
        def fails(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == (3 if hook in ("on_step_end", "on_log") else 2):
                raise torch.OutOfMemoryError("injected")

        setattr(self, hook, fails)


def stopped(folder: Path, hook: str | None, **options: Any) -> tuple[Trained, Any]:
    trained = make(folder, model=model(), plugin=plugin_for(policy="keep"), **OPTIONS, **options)
    if hook is None:
        FailsAt(trained.trainer.accelerator, "clip_grad_norm_", call=3, at=4)
    else:
        trained.trainer.add_callback(FailsOn(hook))
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        trained.trainer.train()
    return trained, caught.value.report


@pytest.mark.parametrize(
    ("hook", "update", "again"),
    [
        (None, 2, 3),
        ("on_substep_end", 2, 1),
        ("on_pre_optimizer_step", 2, 3),
        ("on_step_end", 3, 0),
        ("on_step_begin", 2, 0),
    ],
)
def test_a_trainer_that_stops_between_its_steps(
    tmp_path: Path, hook: str | None, update: int, again: int
) -> None:
    options = {"gradient_accumulation_steps": 3}
    whole = fit(tmp_path / "whole", model=model(), **OPTIONS, **options)
    trained, report = stopped(tmp_path, hook, **options)
    assert report.checkpoint == str(tmp_path / "rematic-emergency" / f"checkpoint-{update}")
    assert report.num_unsaved_steps == again
    assert not any("forward" in vars(m) for m in trained.model.modules())
    resumed = make(tmp_path, model=model(), plugin=plugin_for(policy="keep"), **OPTIONS, **options)
    resumed.trainer.train(resume_from_checkpoint=True)
    mine, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_a_trainer_that_stops_behind_the_optimizers_step(tmp_path: Path) -> None:
    _, report = stopped(tmp_path, "on_optimizer_step")
    assert report.checkpoint is None
    assert report.not_saved.startswith("the optimizer has stepped, and what comes behind its step")
    assert not any(tmp_path.iterdir())

"""An optimizer's step: wrapped on the instance, covered by the retry, followed by a boundary."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.memory import SimulatedProbe, is_out_of_memory
from rematic.optimizer_boundary import OptimizerBoundary
from tests.activations.blocks import make_input, make_model
from tests.events import Events


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def guard(self, _: torch.optim.Optimizer) -> Log:
        return self

    def __enter__(self) -> None:
        self.events.append("guard")

    def __exit__(self, *_: object) -> None:
        self.events.append("unguard")

    def on_step(self) -> None:
        self.events.append("boundary")


def _parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def _boundary(optimizer: torch.optim.Optimizer, log: Log) -> OptimizerBoundary:
    return OptimizerBoundary(optimizer, guard=log.guard, on_step=log.on_step)


def test_a_step_is_guarded_and_followed_by_a_boundary() -> None:
    log, parameter = Log(), _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    _boundary(optimizer, log)
    assert optimizer.step() is None
    assert log.events == ["guard", "unguard", "boundary"]
    assert parameter.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("as_keyword", [True, False], ids=["closure=", "closure"])
def test_a_closure_runs_once_outside_the_guard(as_keyword: bool) -> None:
    log, parameter = Log(), _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    _boundary(optimizer, log)

    def closure() -> float:
        log.events.append(f"closure, gradients {torch.is_grad_enabled()}")
        return 3.0

    with torch.no_grad():
        result = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    assert result == 3.0
    assert log.events == [
        *("guard", "unguard", "closure, gradients True"),
        *("guard", "unguard", "boundary"),
    ]


def test_a_closure_that_fails_leaves_the_guard_closed() -> None:
    log = Log()
    optimizer = torch.optim.SGD([_parameter()], lr=0.5)
    _boundary(optimizer, log)

    def closure() -> float:
        raise KeyError("forward")

    with pytest.raises(KeyError, match="forward"):
        optimizer.step(closure)
    assert log.events == ["guard", "unguard"] * 2


def test_an_optimizer_may_call_its_closure_often() -> None:
    log, parameter = Log(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter], max_iter=4)
    _boundary(optimizer, log)

    def closure() -> torch.Tensor:
        log.events.append("closure")
        optimizer.zero_grad()
        loss = (parameter - 3).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    calls = log.events.count("closure")
    assert calls > 1
    assert log.events == [*["guard", "unguard", "closure"] * calls, "guard", "unguard", "boundary"]


def test_a_step_that_fails_is_no_boundary() -> None:
    log = Log()
    optimizer = torch.optim.SGD([_parameter()], lr=0.5)

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    optimizer.register_step_pre_hook(fail)
    _boundary(optimizer, log)
    with pytest.raises(KeyError, match="hook"):
        optimizer.step()
    assert log.events == ["guard", "unguard"]


def test_detaching_gives_the_step_back() -> None:
    optimizer = torch.optim.SGD([_parameter()], lr=0.5)
    before, own = dict(vars(optimizer)), optimizer.step
    _boundary(optimizer, Log()).detach()
    assert dict(vars(optimizer)) == before
    assert optimizer.step == own


def test_a_step_replaced_before_is_given_back() -> None:
    optimizer, calls = torch.optim.SGD([_parameter()], lr=0.5), []
    own = optimizer.step

    def patched() -> None:
        calls.append("patched")
        own()

    optimizer.step = patched  # type: ignore[assignment, method-assign]
    log = Log()
    boundary = _boundary(optimizer, log)
    optimizer.step()
    boundary.detach()
    assert calls == ["patched"]
    assert log.events[-1] == "boundary"
    assert vars(optimizer)["step"] is patched


@pytest.mark.parametrize("scheduler_first", [True, False], ids=["before", "after"])
def test_schedulers_work_made_before_or_after(scheduler_first: bool) -> None:
    """They wrap the step as well, and warn where theirs is gone."""
    optimizer, log = torch.optim.SGD([_parameter()], lr=0.5), Log()

    def make() -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    scheduler = make() if scheduler_first else None
    boundary = _boundary(optimizer, log)
    scheduler = scheduler or make()
    optimizer.step()
    scheduler.step()
    assert log.events == ["guard", "unguard", "boundary"]
    boundary.detach()
    optimizer.step()
    scheduler.step()
    assert log.events == ["guard", "unguard", "boundary"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_wrapped_optimizer_looks_and_saves_like_itself() -> None:
    optimizer = torch.optim.AdamW([_parameter()], lr=0.5)
    signature = inspect.signature(optimizer.step)
    boundary = _boundary(optimizer, Log())
    assert type(optimizer) is torch.optim.AdamW
    assert inspect.signature(optimizer.step).parameters.keys() == signature.parameters.keys()
    optimizer.step()
    other = torch.optim.AdamW([_parameter()], lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    assert "step" not in vars(copied)
    boundary.detach()


def test_a_step_of_the_session_is_covered_while_records_are_there() -> None:
    """Memory runs out in the optimizer while another graph is alive, whose units can give way."""
    model, probe = make_model(), SimulatedProbe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    session = rematic.attach(model, optimizer, policy="keep", budget="1GiB", probe=probe)
    x = make_input()
    session.run(lambda x: model(x).backward(), x)
    kept = model(x)
    with SimulatedProbe(fail_at_ops=[4]) as failing:
        optimizer.step()
    assert failing.num_ooms == 1
    assert session.evict(1 << 40) < 3 * 128, "one unit gave way"
    del kept
    session.detach()


def test_a_step_with_nothing_to_evict_is_tried_again_without() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    session = rematic.attach(model, optimizer, policy="keep", budget="1GiB", probe=SimulatedProbe())
    session.run(lambda x: model(x).backward(), make_input())
    with SimulatedProbe(fail_at_ops=[4]) as failing:
        optimizer.step()
    assert failing.num_ooms == 1
    session.detach()


def test_a_step_torn_half_way_names_what_it_changed() -> None:
    model, journal = make_model(), Events()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    session = rematic.attach(
        model, optimizer, policy="keep", budget="1GiB", probe=SimulatedProbe(), journal=journal
    )
    session.run(lambda x: model(x).backward(), make_input())
    message = (
        r"^the optimizer's step found no memory after it had changed 2 of 14 parameters or their "
        r"state \(blocks\.0\.up\.weight, blocks\.0\.up\.bias\), and can neither be finished nor "
        r"undone\. "
        r"Resume from the last checkpoint"
    )
    with SimulatedProbe() as counting:
        copy.deepcopy(optimizer).step()
    position = 2 * counting.num_ops // 14 + 2
    with (
        pytest.raises(rematic.TornOptimizerStepError, match=message) as caught,
        SimulatedProbe(fail_at_ops=range(position, position + 3)),
    ):
        optimizer.step()
    assert not is_out_of_memory(caught.value)
    (stop,) = journal.of("stop")
    assert stop["parameters"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    session.detach()


def test_a_step_that_fails_before_it_changes_anything_passes_the_error_on() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = rematic.attach(model, optimizer, policy="keep", budget="1GiB", probe=SimulatedProbe())
    session.run(lambda x: model(x).backward(), make_input())
    with pytest.raises(torch.OutOfMemoryError), SimulatedProbe(fail_at_ops=[1, 2, 3]):
        optimizer.step()
    session.detach()


def test_on_one_of_several_ranks_such_a_step_stops_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may have made theirs: whoever skips the batch would train other weights."""
    monkeypatch.setattr("rematic.optimizer_boundary.num_ranks", lambda: 2)
    aborted: list[bool] = []
    monkeypatch.setattr("rematic.session_step.abort_ranks", lambda: aborted.append(True))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = rematic.attach(model, optimizer, policy="keep", budget="1GiB", probe=SimulatedProbe())
    session.run(lambda x: model(x).backward(), make_input())
    with (
        pytest.raises(rematic.TornOptimizerStepError, match="no memory on this rank") as caught,
        SimulatedProbe(fail_at_ops=[1, 2, 3]),
    ):
        optimizer.step()
    assert not is_out_of_memory(caught.value)
    assert caught.value.parameters == ()
    assert aborted == [True]
    session.detach()

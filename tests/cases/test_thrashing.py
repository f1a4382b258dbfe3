"""Case F10: near the limit, allocators retry and steps recover; neither may thrash or spam."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import pytest
import torch

import rematic
from rematic.control import audit
from rematic.control.risk import TREND_STEPS, WARM_UP_STEPS
from rematic.memory import SimulatedProbe
from rematic.policy import RECOMPUTE
from rematic.recipes import GoalsConfig, PolicyConfig, Recipe
from tests.activations.blocks import make_input, make_model
from tests.events import Events
from tests.test_supervisor import MIB, QUIET, Run

CROWDED = dataclasses.replace(QUIET, reserved_bytes=950 * MIB)
PATIENT = Recipe(goals=GoalsConfig(slowdown_max=1e9))  # a toy's seconds are noise
WINDOW_STEPS = 200


def switches_of(counts: Iterable[int]) -> list[str]:
    """Returns the policies that a run switches to whose allocator has so many retries by step."""
    run = Run(policy="keep", recipe=PATIENT)
    for count in counts:
        run.probe.says = dataclasses.replace(CROWDED, num_alloc_retries=count)
        run.steps(1)
    return [event["to"] for event in run.journal.of("switch")]


def test_retries_in_the_first_steps_are_ignored() -> None:
    assert switches_of([*range(WARM_UP_STEPS), *[WARM_UP_STEPS] * 20]) == []


def test_an_isolated_retry_is_no_reason_for_a_switch() -> None:
    assert switches_of([0] * 10 + [1] * 10 + [2] * 10 + [3, 4] + [4] * 10) == []


@pytest.mark.parametrize("more", range(TREND_STEPS))
def test_a_rising_count_is_a_reason_for_exactly_one_switch(more: int) -> None:
    """Also where it goes on to rise in the first steps under the next policy."""
    rising = range(1, TREND_STEPS + more + 1)
    assert switches_of([*[0] * 10, *rising, *[rising[-1]] * 20]) == ["selective"]


def test_steps_that_run_out_one_after_the_other_are_not_run_twice_for_ever() -> None:
    """A repeated step is quiet in its last run, and was trouble all the same."""
    journal, model, probe = Events(), make_model(), SimulatedProbe()
    probe.track(model.parameters())
    recipe = dataclasses.replace(PATIENT, policy=PolicyConfig(op_retry="never"))
    session = rematic.attach(model, policy="keep", recipe=recipe, probe=probe, journal=journal)
    probe.budget_bytes = 31_200
    with probe:
        for _ in range(30):
            session.run(lambda x: model(x).backward(), make_input(100))
            model.zero_grad()
    retried = [event["step"] for event in journal.of("step") if event["step_retries"]]
    assert len(retried) == len(journal.of("retry")) / 2 < 15, "one at a unit, one of the step"
    assert session.policy == RECOMPUTE
    assert audit(json.loads(json.dumps(journal.events))).differences == ()
    session.detach()


def test_recovered_steps_are_each_counted_and_hardly_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log is for what changes; the journal has every one."""
    run = Run(policy="recompute+offload")
    steps = 60
    for _ in range(steps):
        failures = [torch.OutOfMemoryError("CUDA out of memory")]

        def fn(x: torch.Tensor, failures: list[Exception] = failures) -> None:
            loss = run.model(x)
            if failures:
                raise failures.pop()
            loss.backward()

        run.session.run(fn, make_input())
    assert sum(event["step_retries"] for event in run.journal.of("step")) == steps
    assert len(run.journal.of("retry")) == steps
    (asked,) = caplog.messages
    assert asked.startswith("pressure under policy 'recompute+offload' in 10 steps in a row")


def test_ten_thousand_recovered_steps_say_little(caplog: pytest.LogCaptureFixture) -> None:
    """What is decided and never comes is asked for, and told of, once a window."""
    run = Run(policy="keep")
    run.steps(1)
    event = {**run.journal.of("step")[0], "op_retries": 1, "evicted_bytes": MIB}
    for step in range(1, 10_001):
        run.session.supervisor.after_step({**event, "step": step})
    assert 1 <= len(caplog.records) <= 10_000 / WINDOW_STEPS + 1

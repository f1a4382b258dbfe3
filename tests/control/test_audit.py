"""A journal leads to the decisions that are in it, and shows where somebody changed it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rematic
from rematic.control import audit, replay
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Policy, Rule
from rematic.recipes import ControlConfig, Recipe
from tests.activations.blocks import make_input, make_model
from tests.events import Events
from tests.test_supervisor import CRAMPED, QUIET, PaperProbe

Event = dict[str, Any]


def read_back(journal: Events) -> list[Event]:
    """The events as a reader of the file gets them."""
    events: list[Event] = json.loads(json.dumps(journal.events))
    return events


def a_planned_run() -> Events:
    """Lengths that vary, under a budget that is tight at the longest, resumed once."""
    journal, state = Events(), None
    for _ in range(2):
        model, probe = make_model(), SimulatedProbe()
        probe.track(model.parameters())
        session = rematic.attach(model, budget=28_000, probe=probe, journal=journal)
        if state is not None:
            session.load_state_dict(state)
        with probe:
            for batch in (8, 16, 4, 64, 64, 32, 100, 100, 16, 8, 100):
                session.run(lambda x, model=model: model(x).backward(), make_input(batch))
                model.zero_grad()
        state = session.state_dict()
        session.detach()
    return journal


def a_run_that_switches() -> Events:
    """Pressure, a heavier policy with the rules of the one before, an operator, a return."""
    journal, probe, model = Events(), PaperProbe(), make_model()
    session = rematic.attach(
        model,
        policy=Policy(
            name="keep", rules=(Rule(pattern="blocks.0", action=Keep()),), default=Keep()
        ),
        recipe=Recipe(control=ControlConfig(cool_down_steps=5, probation_steps=3)),
        probe=probe,
        journal=journal,
    )
    for step in range(40):
        probe.says = CRAMPED if 5 <= step < 9 else QUIET
        if step == 30:
            session.pin("recompute")
        if step == 34:
            session.unpin()
        with session.step(make_input()):
            model(make_input()).backward()
    return journal


RUNS = {"planned": a_planned_run, "switching": a_run_that_switches}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_an_honest_journal_has_no_differences(run: Callable[[], Events]) -> None:
    """Contract 10."""
    events = read_back(run())
    report = audit(events)
    assert report.differences == ()
    assert report.num_steps == sum(event["event"] == "step" for event in events) > 20
    assert report.num_unaudited == 0
    assert report.num_decisions == sum(event["event"] == "decision" for event in events)


def test_the_runs_show_something() -> None:
    planned, switching = a_planned_run(), a_run_that_switches()
    assert len({json.dumps(event["plan"]) for event in planned.of("step")}) > 1
    assert len(planned.of("control")) == 2
    changes = [event["change"] for event in switching.of("decision")]
    assert changes.count("switch") >= 1
    assert switching.of("switch")[0]["to"] == "selective"


def first(events: list[Event], kind: str, **having: Any) -> Event:
    return next(e for e in events if e["event"] == kind and having.items() <= e.items())


def another_plan(events: list[Event]) -> None:
    first(events, "step", step=9)["plan"] = {"keep": 17}


def another_reason(events: list[Event]) -> None:
    first(events, "step", step=9)["reason"] = "because"


def another_peak(events: list[Event]) -> None:
    """The prediction of later steps rests on what this one learned."""
    learned = first(events, "step", step=0)["learned"]
    learned["head"] = 2 * learned["head"]


FORGED_PLANS = {f.__name__: f for f in (another_plan, another_reason, another_peak)}


@pytest.mark.parametrize("forge", FORGED_PLANS.values(), ids=FORGED_PLANS.keys())
def test_a_changed_plan_is_found(forge: Callable[[list[Event]], None]) -> None:
    events = read_back(a_planned_run())
    forge(events)
    assert audit(events).differences


def another_verdict(events: list[Event]) -> None:
    first(events, "decision", change="switch")["policy"] = "recompute"


def a_decision_less(events: list[Event]) -> None:
    events.remove(first(events, "decision", change="switch"))


def a_decision_more(events: list[Event]) -> None:
    place = events.index(first(events, "step", step=2))
    events.insert(place + 1, {**first(events, "decision", change="switch"), "step": 2})


def other_figures(events: list[Event]) -> None:
    for event in events:
        if event["event"] == "step":
            event["peak_bytes"] = 1


FORGED_DECISIONS = {
    f.__name__: f for f in (another_verdict, a_decision_less, a_decision_more, other_figures)
}


@pytest.mark.parametrize("forge", FORGED_DECISIONS.values(), ids=FORGED_DECISIONS.keys())
def test_a_changed_decision_is_found(forge: Callable[[list[Event]], None]) -> None:
    events = read_back(a_run_that_switches())
    forge(events)
    assert audit(events).differences


def test_steps_before_there_was_a_controller_are_counted() -> None:
    events = [e for e in read_back(a_run_that_switches()) if e["event"] != "control"]
    report = audit(events)
    assert (report.num_steps, report.num_unaudited) == (0, 40)


def test_a_step_that_ran_again_is_not_compared() -> None:
    events = read_back(a_planned_run())
    place = events.index(first(events, "step", step=9))
    events.insert(place, {"event": "retry", "level": "step", "step": 9})
    another_plan(events)
    report = audit(events)
    assert report.differences == ()
    assert report.num_retried == 1


def test_replaying_needs_no_torch_state() -> None:
    events = read_back(a_planned_run())
    torch.manual_seed(1)
    assert list(replay(events)) == list(replay(events))

"""A journal leads to the decisions that are in it, and shows where somebody changed it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rematic
from rematic.control import audit, replay
from rematic.control.damaged import DamagedEventError
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Policy, Rule
from rematic.recipes import ControlConfig, GoalsConfig, Recipe
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


def a_decision_twice(events: list[Event]) -> None:
    decision = first(events, "decision", change="switch")
    events.insert(events.index(decision), decision)


def a_decision_of_another_step(events: list[Event]) -> None:
    first(events, "decision", change="switch")["step"] -= 1


def a_decision_without_its_rule(events: list[Event]) -> None:
    del first(events, "decision", change="switch")["rule"]


def a_step_less(events: list[Event]) -> None:
    events.remove(first(events, "step", step=20))


def a_step_twice(events: list[Event]) -> None:
    step = first(events, "step", step=20)
    events.insert(events.index(step), step)


def another_policy_in_a_step(events: list[Event]) -> None:
    first(events, "step", step=20)["policy"] = "recompute"


def a_step_that_was_not_pinned(events: list[Event]) -> None:
    first(events, "step", step=32)["pinned"] = False


def a_switch_from_elsewhere(events: list[Event]) -> None:
    first(events, "switch")["from"] = "recompute"


def a_switch_to_elsewhere(events: list[Event]) -> None:
    first(events, "switch")["to"] = "recompute"


def a_switch_of_another_step(events: list[Event]) -> None:
    first(events, "switch")["step"] += 1


def a_switch_less(events: list[Event]) -> None:
    events.remove(first(events, "switch"))


def an_unpin_less(events: list[Event]) -> None:
    events.remove(first(events, "unpin"))


FORGED_DECISIONS = {
    f.__name__: f
    for f in (
        another_verdict,
        a_decision_less,
        a_decision_more,
        a_decision_twice,
        a_decision_of_another_step,
        a_decision_without_its_rule,
        other_figures,
        a_step_less,
        a_step_twice,
        another_policy_in_a_step,
        a_step_that_was_not_pinned,
        a_switch_from_elsewhere,
        a_switch_to_elsewhere,
        a_switch_of_another_step,
        a_switch_less,
        an_unpin_less,
    )
}


@pytest.mark.parametrize("forge", FORGED_DECISIONS.values(), ids=FORGED_DECISIONS.keys())
def test_a_changed_decision_is_found(forge: Callable[[list[Event]], None]) -> None:
    events = read_back(a_run_that_switches())
    forge(events)
    assert audit(events).differences


def test_missing_lines_are_told_once_and_what_follows_is_not_audited() -> None:
    """The state behind them is not known, so nothing more can be said."""
    events = read_back(a_planned_run())
    for number in (3, 4):
        events.remove(first(events, "step", step=number))
    report = audit(events)
    (found,) = report.differences
    assert (found.field, found.written, found.decided) == ("step", 5, 3)
    assert (report.num_steps, report.num_unaudited) == (3 + 11, 6)


DAMAGED: dict[str, tuple[str, Callable[[Event], object]]] = {
    "a step without what it learned": ("step", lambda event: event.pop("learned")),
    "a step without numbers": ("step", lambda event: event.update(tokens="many")),
    "a step of no number": ("step", lambda event: event.update(step=None)),
    "a change without its policy": ("switch", lambda event: event.pop("policy")),
    "another kind of state": ("control", lambda event: event.update(state=[])),
    "no rules": ("control", lambda event: event.pop("rules")),
    "an unknown action": ("switch", lambda event: event["policy"]["default"].update(name="x")),
}


@pytest.mark.parametrize(("kind", "damage"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_event_is_named(kind: str, damage: Callable[[Event], object]) -> None:
    events = read_back(a_run_that_switches())
    damage(first(events, kind))
    with pytest.raises(DamagedEventError, match=rf"the `{kind}` event of step \w+ is damaged"):
        audit(events)


def a_compared_run(*, spoils: bool = False) -> Events:
    """Runs batches of rising lengths under two policies; may spoil what could be taken back."""
    journal, model = Events(), make_model()
    session = rematic.attach(
        model,
        policy="keep",
        recipe=Recipe(
            goals=GoalsConfig(loss_tolerance=0.01, slowdown_max=1e9, ooms_max=9),
            control=ControlConfig(probation_steps=5),
        ),
        probe=PaperProbe(),
        journal=journal,
    )

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        if spoils:
            with torch.no_grad():
                next(model.parameters()).sub_(0.1)
        return loss.detach()

    for number, length in enumerate((4, 4, 4, 4, 8, 12, 20, 40)):
        if number == 2:
            session.switch("recompute")
        session.run(fn, make_input(length))
    session.detach()
    return journal


def test_an_audit_sees_why_a_batch_was_compared() -> None:
    events = read_back(a_compared_run())
    assert audit(events).differences == ()
    chosen = {e["step"]: e["comparison"]["rule"] for e in events if e.get("comparison")}
    assert chosen == {
        3: "no batch under recompute was compared yet",
        4: "twice as long as the longest one compared (4)",
        6: "twice as long as the longest one compared (8)",
    }
    assert [e["rule"] for e in events if e["event"] == "compare"] == list(chosen.values())
    for number, said in ((3, None), (5, first(events, "step", step=4)["comparison"])):
        forged = read_back(a_compared_run())
        first(forged, "step", step=number)["comparison"] = said
        assert "comparison" in {difference.field for difference in audit(forged).differences}


def test_an_audit_sees_comparisons_that_came_to_nothing() -> None:
    events = read_back(a_compared_run(spoils=True))
    assert audit(events).differences == ()
    outcomes = {e["step"]: e["comparison"]["outcome"] for e in events if e.get("comparison")}
    assert outcomes == dict.fromkeys((3, 4, 5), "first run stands"), "three tries"


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

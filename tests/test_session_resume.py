"""F13: a session that is configured otherwise than the saved one goes on so, and says it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

import rematic
from rematic.control.audit import audit
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Policy, Recompute, Rule, policy_named
from tests.activations.blocks import make_input, make_model

State = dict[str, Any]
LOSSY = {"policy": {"allow_lossy": True}}


class Events(list[dict[str, Any]]):
    """A journal in memory."""

    def write(self, event: Mapping[str, Any]) -> None:
        self.append(json.loads(json.dumps(event)))

    def texts(self) -> list[str]:
        return [event["text"] for event in self if event.get("kind") == "resume"]


def saved_by(
    policy: str | Policy = "planned", *, switch_to: str | None = None, **more: Any
) -> State:
    """The state after two steps."""
    session, _ = steps(policy, switch_to=switch_to, **more)
    return json.loads(json.dumps(session.state_dict()))  # type: ignore[no-any-return]


def steps(
    policy: str | Policy = "planned",
    *,
    state: State | None = None,
    switch_to: str | None = None,
    pin: bool = False,
    budget: int = 28_000,
    journal: Events | None = None,
    recipe: Any = "auto",
    num_steps: int = 2,
) -> tuple[rematic.Session, Events]:
    """A session that has taken steps, after what was saved, and its journal."""
    model, probe, journal = make_model(), SimulatedProbe(), Events() if journal is None else journal
    probe.track(model.parameters())
    session = rematic.attach(
        model, policy=policy, budget=budget, probe=probe, journal=journal, recipe=recipe
    )
    if state is not None:
        session.load_state_dict(state)
    with probe:
        for number in range(num_steps):
            if number == 1 and switch_to is not None:
                (session.pin if pin else session.switch)(switch_to)
            session.run(lambda x: model(x).backward(), make_input(16))
            model.zero_grad()
    session.detach()
    return session, journal


OWN = Policy(name="own", rules=(Rule(pattern="blocks.0", action=Keep()),), default=Recompute())


@pytest.mark.parametrize("now", ["recompute", OWN], ids=["another", "its rules"])
def test_a_policy_that_is_configured_anew_follows(
    now: str | Policy, caplog: pytest.LogCaptureFixture
) -> None:
    begun: str | Policy = "planned" if now == "recompute" else Policy(name="own", default=Keep())
    state = saved_by(begun, switch_to="keep")
    with caplog.at_level(logging.WARNING, "rematic"):
        session, journal = steps(now, state=state)
    name = now if isinstance(now, str) else now.name
    text = f"{name!r} is configured now and takes its place"
    assert [event["to"] for event in journal if event["event"] == "switch"] == [name]
    assert [event["policy"] for event in journal if event["event"] == "step"] == [name] * 2
    assert session.policy == policy_named(now)
    assert text in journal.texts()[0]
    assert any(text in message for message in caplog.messages)
    session.rollback()
    assert session.policy.name == "keep"


def test_the_saved_policy_goes_on_where_nothing_was_changed() -> None:
    state = saved_by("planned", switch_to="keep")
    for _ in range(2):
        session, journal = steps("planned", state=state)
        assert session.policy.name == "keep"
        assert journal.texts() == []
        state = session.state_dict()


def test_a_change_is_made_once() -> None:
    """What a controller or a person has done after it is not undone by the next resume."""
    changed, _ = steps("recompute", state=saved_by("planned"), switch_to="selective")
    session, journal = steps("recompute", state=changed.state_dict())
    assert session.policy.name == "selective"
    assert journal.texts() == []


def test_a_pinned_policy_stays_and_that_is_said_each_time() -> None:
    state = saved_by("planned", switch_to="keep", pin=True)
    for _ in range(2):
        session, journal = steps("recompute", state=state)
        assert session.policy.name == "keep"
        assert session.history.pinned
        (text,) = journal.texts()
        assert "'recompute' is configured now and has no effect: 'keep' is pinned" in text
        state = session.state_dict()


@pytest.mark.parametrize("pin", [False, True])
def test_a_lossy_policy_that_is_not_allowed_any_more_goes(pin: bool) -> None:
    pytest.importorskip("bitsandbytes")
    state = saved_by("planned", switch_to="compress", pin=pin, recipe=LOSSY)
    kept, _ = steps("planned", state=state, recipe=LOSSY)
    assert kept.policy.name == "compress"
    session, journal = steps("planned", state=state)
    assert session.policy.name == "planned"
    assert "'compress', which loses precision and is not allowed now" in journal.texts()[0]
    assert not any(entry.policy.is_lossy for entry in session.history.entries)


def test_a_lossy_policy_that_is_new_is_on_probation() -> None:
    pytest.importorskip("bitsandbytes")
    tried = {"goals": {"gradient_tolerance": 0.5}}
    session, journal = steps("compress", state=saved_by("planned"), recipe=tried)
    assert [e["to"] for e in journal if e["event"] == "switch"] == ["recompute", "compress"]
    again, _ = steps("compress", state=session.state_dict(), recipe=tried)
    assert len(again.history.entries) == len(session.history.entries)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 56_000}, "budget (27.3 KiB before, 54.7 KiB now)"),
        ({"recipe": {"goals": {"slowdown_max": 9.0}}}, "goals"),
        ({"recipe": {"control": {"cool_down_steps": 3}}}, "control"),
        ({"recipe": {"control": {"adapt": False}}}, "control"),
        ({"budget": 28_500}, ""),
        ({}, ""),
    ],
    ids=["budget", "goals", "pace", "adapt", "about the same", "the same"],
)
def test_what_was_held_against_policies_under_other_terms_is_forgotten(
    changes: dict[str, Any], words: str
) -> None:
    state = saved_by("planned")
    state["control"].update(quarantine=[["keep", 3, "slowdown"]], cool_until=900, cool_factor=8)
    session, journal = steps("planned", state=state, num_steps=0, **changes)
    found = session.state_dict()["control"]
    if words:
        assert words in journal.texts()[0]
        assert (found["quarantine"], found["cool_until"], found["cool_factor"]) == ([], 0, 1)
    else:
        assert journal.texts() == []
        assert (found["cool_until"], found["cool_factor"]) == (900, 8)
        assert found["quarantine"] == [["keep", 3, "slowdown"]]


def test_an_audit_follows_the_change() -> None:
    journal = Events()
    first, _ = steps("planned", journal=journal)
    steps("recompute", state=first.state_dict(), journal=journal, budget=56_000)
    assert audit(journal).differences == ()

"""F13: a state that is damaged anywhere is refused as a whole, when it is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rematic
from rematic.hosts.session_file import FILE_NAME, read_session, write_session
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Policy, Rule
from tests.activations.blocks import make_input, make_model

State = dict[str, Any]


def trained() -> rematic.Session:
    """A session on probation, after steps under two policies."""
    model, probe = make_model(), SimulatedProbe()
    probe.track(model.parameters())
    session = rematic.attach(
        model, budget=28_000, probe=probe, recipe={"goals": {"slowdown_max": 1e9}}
    )
    with probe:
        for number, batch in enumerate((8, 64, 100, 32)):
            if number == 2:
                session.switch("selective")
            session.run(lambda x: model(x).backward(), make_input(batch))
            model.zero_grad()
    return session


@pytest.fixture(scope="module")
def state() -> State:
    session = trained()
    session.detach()
    saved: State = json.loads(json.dumps(session.state_dict()))
    assert saved["control"]["trial"] is not None
    return saved


def first_sample(state: State) -> list[Any]:
    sample: list[Any] = state["control"]["samples"][0][2][0]
    return sample


DAMAGE: dict[str, tuple[Callable[[State], object], str]] = {
    "no units": (lambda s: s.update(units=None), "its units are None"),
    "steps": (lambda s: s.update(num_steps="x"), "state.num_steps is 'x': expected int"),
    "no history": (lambda s: s["history"].update(entries=[]), "state.history.entries is empty"),
    "a name": (
        lambda s: s["history"]["entries"][0]["policy"].update(name=[]),
        r"state.history.entries\[0\].policy.name is \[\]: expected str",
    ),
    "an action": (
        lambda s: s["history"]["entries"][1]["policy"]["default"].update(name="x"),
        "ValueError: unknown action 'x'",
    ),
    "a cost": (
        lambda s: s["costs"].update(longest=float("nan")),
        "state.costs.longest is nan: expected int",
    ),
    "a depth": (
        lambda s: s["control"].update(depth=None),
        "state.controller.depth is None: expected int",
    ),
    "a sample": (
        lambda s: first_sample(s).__setitem__(2, "fast"),
        r"state.controller.samples\[.*\]\[0\].seconds is 'fast': expected float",
    ),
    "a field too many": (lambda s: s["control"].update(new=1), "TypeError: .*'new'"),
    "a probation": (
        lambda s: s["control"]["trial"].update(policy=1),
        "state.controller.trial.policy is 1: expected str",
    ),
    "no control": (lambda s: s.pop("control"), "KeyError: 'control'"),
    "no drift": (lambda s: s["control"].pop("drift"), "KeyError: 'drift'"),
    "no configuration": (lambda s: s.pop("configured"), "KeyError: 'configured'"),
    "a budget": (
        lambda s: s["configured"].update(budget_bytes="1GiB"),
        "state.configured.budget_bytes is '1GiB': expected int",
    ),
    "a planner": (lambda s: s.update(planner=[{}]), "KeyError: 'kind'"),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(state: State, damage: Callable[[State], object], why: str) -> None:
    damaged = copy.deepcopy(state)
    damage(damaged)
    session = rematic.attach(make_model(), policy="keep")
    before = session.state_dict()
    with pytest.raises(ValueError, match=rf"^the saved state is damaged \({why}.*\): expected"):
        session.load_state_dict(damaged)
    assert session.state_dict() == before
    session.detach()


def test_a_rule_that_matches_nothing_leaves_all_as_it_was(state: State) -> None:
    policy = Policy(name="own", rules=(Rule(pattern="blocks.0", action=Keep()),), default=Keep())
    source = rematic.attach(make_model(), policy=policy)
    saved = source.state_dict()
    saved["history"]["entries"][0]["policy"]["rules"][0]["match"] = "layers.*"
    session = rematic.attach(make_model(), policy="keep")
    before = session.state_dict()
    with pytest.raises(ValueError, match=r"'layers\.\*' matches no"):
        session.load_state_dict({**state, "history": saved["history"]})
    assert session.state_dict() == before


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000, b"7"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    session = rematic.attach(make_model(), policy="keep")
    with pytest.raises(ValueError, match="is damaged"):
        read_session(session, tmp_path)


def test_a_file_is_whole_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = trained()
    write_session(session, tmp_path)
    before = (tmp_path / FILE_NAME).read_text()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    session.num_steps += 1
    with pytest.raises(KeyboardInterrupt):
        write_session(session, tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == before
    session.detach()

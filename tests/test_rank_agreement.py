"""Two sessions as of two ranks, over one store: what one asks for comes on both at one boundary."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rematic
from rematic.control import audit
from rematic.control.agreement import DISTANCE
from rematic.journal import JournalWriter, read_journal
from rematic.operator_requests import append_request
from rematic.policy import KEEP, RECOMPUTE, SELECTIVE
from rematic.rank_agreement import RankAgreement, make_agreement
from rematic.recipes import ControlConfig, Recipe
from tests.activations.blocks import make_input, make_model
from tests.events import Events
from tests.test_supervisor import CRAMPED, QUIET, PaperProbe


class Rank:
    """A session that believes itself to be one of two."""

    def __init__(self, store: Any, rank: int, **options: Any) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe, self.journal = PaperProbe(), options.pop("journal", None) or Events()
        self.session = rematic.attach(
            self.model,
            self.optimizer,
            probe=self.probe,
            journal=self.journal,
            **{"policy": "keep", **options},
        )
        self.session._policies._has_looked = True
        self.session._policies._agreement = RankAgreement(store, rank=rank, num_ranks=2)

    def step(self) -> None:
        with self.session.step(make_input()):
            self.model(make_input()).backward()
        self.optimizer.step()


Make = Callable[..., list[Rank]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Make:
    for module in ("policy_changes", "session"):
        monkeypatch.setattr(f"rematic.{module}.num_ranks", lambda: 2)

    def make(store: Any = None, **options: Any) -> list[Rank]:
        store = torch.distributed.HashStore() if store is None else store
        return [Rank(store, rank, **options) for rank in range(2)]

    return make


def together(ranks: list[Rank], number: int) -> list[list[str]]:
    """Steps both in turn; returns the policies of each after every step."""
    seen: list[list[str]] = [[], []]
    for _ in range(number):
        for rank, names in zip(ranks, seen, strict=True):
            rank.step()
            names.append(rank.session.policy.name)
    return seen


def test_a_switch_of_one_comes_on_both_in_the_same_step(ranks: Make) -> None:
    one, other = both = ranks()
    together(both, 1)
    one.session.switch("recompute", reason="long ones ahead")
    assert one.session.policy == KEEP  # not before the other can
    seen = together(both, DISTANCE)
    assert seen == [["keep"] * (DISTANCE - 1) + ["recompute"]] * 2
    for rank in both:
        (event,) = rank.journal.of("switch")
        assert (event["rank"], event["reason"]) == (0, "long ones ahead")
        (proposed,) = rank.journal.of("agreement")
        assert (proposed["status"], proposed["policy"], proposed["rank"]) == (
            "proposed",
            "recompute",
            0,
        )
    together(both, 1)
    assert other.session.last_step is not None
    assert other.session.last_step.plan == {"recompute": 3}
    assert other.session.history.entries[-1].policy == RECOMPUTE


def test_what_every_rank_asks_for_comes_once(ranks: Make) -> None:
    both = ranks()
    together(both, 1)
    for rank in both:
        rank.session.switch("selective")
        rank.session.switch("recompute")
    together(both, 3 * DISTANCE)
    for rank in both:
        names = [entry.policy.name for entry in rank.session.history.entries]
        assert names == ["keep", "selective", "recompute"]
    for rank in both:
        rank.session.rollback()
    together(both, 2 * DISTANCE)
    assert [rank.session.policy for rank in both] == [SELECTIVE] * 2


def test_what_one_rank_cannot_do_comes_on_none(ranks: Make) -> None:
    """The second has other policies behind it."""
    one, other = both = ranks()
    other.session._policies.take_up(one.session.history)
    one.session.switch("recompute")
    together(both, DISTANCE + 1)
    one.session._policies.history = type(one.session.history)(
        entries=(*one.session.history.entries, one.session.history.entries[-1])
    )
    one.session.rollback(steps=2)
    together(both, DISTANCE + 1)
    assert len(one.session.history.entries) == 3
    assert len(other.session.history.entries) == 2
    refused = [e for e in one.journal.of("agreement") if e["status"] == "refused"]
    assert refused[0]["reason"].startswith("rank 1: cannot roll back 2 switches: expected")
    assert one.session._policies.pending == []


def test_a_pin_of_an_operator_on_one_rank_holds_on_both(ranks: Make, tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        one, other = both = ranks()
        one.session.detach()
        store = one.session._policies._agreement._store
        both[0] = one = Rank(store, 0, journal=journal)
        append_request(tmp_path, "pin", policy="recompute", reason="tonight")
        together(both, DISTANCE + 2)
        assert [rank.session.policy for rank in both] == [RECOMPUTE] * 2
        with pytest.raises(ValueError, match="cannot switch to 'keep': the policy 'recompute' is"):
            other.session.switch("keep")
        append_request(tmp_path, "unpin")
        one.session.supervisor._supervision.requests._next_look = 0.0
        together(both, DISTANCE + 2)
        assert not other.session.history.pinned
    events = list(read_journal(tmp_path / "journal.jsonl"))
    assert [e["status"] for e in events if e["event"] == "request"] == ["accepted"] * 2
    assert [e["rank"] for e in events if e["event"] == "pin"] == [0]


def test_pressure_on_one_rank_takes_a_heavier_policy_on_both(ranks: Make) -> None:
    one, other = both = ranks()
    together(both, 2)
    one.probe.says = CRAMPED
    together(both, 4 + DISTANCE)
    assert [rank.session.policy for rank in both] == [SELECTIVE] * 2
    assert other.journal.of("switch")[0]["rank"] == 0
    for rank in both:
        assert audit(rank.journal.events).differences == ()


def test_a_policy_that_fails_on_one_rank_leaves_both_and_is_not_taken_again(ranks: Make) -> None:
    recipe = Recipe(control=ControlConfig(probation_steps=3))
    one, other = both = ranks(recipe=recipe)
    together(both, 3)
    other.session.switch("selective")
    together(both, DISTANCE)
    assert [rank.session.policy for rank in both] == [SELECTIVE] * 2
    one.probe.says = CRAMPED  # misses the goal of headroom during probation, on this rank alone
    together(both, 3 + DISTANCE + 1)
    assert [rank.session.policy for rank in both] == [KEEP] * 2
    for rank in both:
        (event,) = rank.journal.of("rollback")
        assert "headroom" in event["reason"]
        assert {name for name, _ in rank.session.supervisor.state.quarantine} == {"selective"}
    one.probe.says = QUIET
    together(both, 2)
    for rank in both:
        assert audit(rank.journal.events).differences == ()


def test_a_rank_for_which_a_lighter_policy_does_not_fit_keeps_both_from_it(ranks: Make) -> None:
    one, _ = both = ranks()
    together(both, 2)
    for rank in both:
        rank.probe.says = CRAMPED
    together(both, 2 + DISTANCE)
    for rank in both:
        rank.probe.says = QUIET
    together(both, 1)
    together(both, 1)
    assert [rank.session.policy for rank in both] == [SELECTIVE] * 2
    assert [rank.session.supervisor.state.left for rank in both] == [("keep",)] * 2
    change = rematic.control.Change(kind="switch", policy=KEEP, reason="", by_controller=True)
    one.session.ask(change)
    together(both, DISTANCE + 1)
    assert [rank.session.policy for rank in both] == [SELECTIVE] * 2
    refused = [e for e in one.journal.of("agreement") if e["status"] == "refused"]
    assert "keep was left for want of memory on this rank" in refused[0]["reason"]
    one.session.switch("keep")  # a person may
    together(both, DISTANCE + 1)
    assert [rank.session.policy for rank in both] == [KEEP] * 2


def test_a_rank_that_ends_early_holds_up_nobody(
    ranks: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = both = ranks()
    together(both, 1)
    other.session.detach()
    one.session.switch("recompute")
    for _ in range(7 * DISTANCE + 2):
        one.step()
    assert one.session.policy == KEEP
    late = [e for e in one.journal.of("agreement") if e["status"] == "late"]
    assert [e["reason"] for e in late] == ["no answer in time from rank 1"] * 3
    assert [r.message for r in caplog.records if "switch" in r.message] == [
        "a switch to recompute was not answered by the ranks: no answer in time from rank 1"
    ]


class Gone:
    """The store of a rank that is gone."""

    def check(self, keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_stops_no_training(
    ranks: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = ranks(store=Gone())
    with caplog.at_level(logging.WARNING, "rematic"):
        one.session.switch("recompute")
        for _ in range(3):
            one.step()
    assert one.session.policy == KEEP
    assert [r.message for r in caplog.records] == [
        "the store of the process group does not answer (Connection reset by peer): policies stay "
        "as they are on every rank from here on"
    ]


def test_without_a_store_changes_are_those_of_each_rank(
    ranks: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rematic.rank_agreement.num_ranks", lambda: 2)
    monkeypatch.setattr("rematic.rank_agreement.process_group_store", lambda prefix: None)
    assert make_agreement(["blocks.0"]) is None
    assert "call `switch`, `rollback` and `pin` on every rank" in caplog.text
    (one, _) = ranks()
    one.session._policies._has_looked = False
    one.session._policies._agreement = None
    one.step()
    one.session.switch("recompute")
    assert one.session.policy == RECOMPUTE
    assert one.journal.of("control")[0]["rules"]["adapt"] is False


def test_one_rank_writes_a_journal_that_all_of_them_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr("rematic.rank_agreement.num_ranks", lambda: 2)
    monkeypatch.setattr("rematic.rank_agreement.process_group_store", lambda prefix: store)
    sessions = []
    for rank in range(2):
        monkeypatch.setattr("rematic.rank_agreement.this_rank", lambda rank=rank: rank)
        with JournalWriter(tmp_path / "journal.jsonl") as journal:
            sessions.append(rematic.attach(make_model(), policy="keep", journal=journal))
    assert sum(e["event"] == "attach" for e in read_journal(tmp_path / "journal.jsonl")) == 1
    assert "journal.jsonl is written by rank 0: rank 1 keeps no journal" in caplog.text
    assert sessions[1].supervisor._supervision.requests is None
    with JournalWriter(tmp_path / "journal-1.jsonl") as journal:
        rematic.attach(make_model(), policy="keep", journal=journal)
    assert len(list(read_journal(tmp_path / "journal-1.jsonl"))) == 1


def test_ranks_that_begin_apart_cannot_replay_what_needs_all(ranks: Make) -> None:
    store = torch.distributed.HashStore()
    one, other = Rank(store, 0), Rank(store, 1, policy="recompute")
    for rank in (one, other):
        rank.session._policies._agreement.begin(rank.session.policy.name)
        rank.step()  # with units that each rank replays for itself
        rank.session._engine.units[0].joint = "its forward exchanges tensors with other ranks"
    one.step()
    with pytest.raises(ValueError, match="begun with the policy 'recompute' and another rank"):
        other.step()


def test_events_are_plain(ranks: Make) -> None:
    one, _ = both = ranks()
    one.session.switch("recompute")
    together(both, DISTANCE + 1)
    json.dumps(one.journal.events)

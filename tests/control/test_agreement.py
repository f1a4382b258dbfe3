"""Ranks that agree through a store: every interleaving of their requests, ranks that die or lag."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.control import Change, Meeting, Standing, change_from_plain, change_to_plain, meet
from rematic.control.agreement import DISTANCE, DISTANCE_MAX, Ask
from rematic.policy import RECOMPUTE, Policy, Recompute, Rule

OWN = Policy(
    name="own",
    rules=(Rule(pattern="*", action=Recompute(), first=2),),
    default=Recompute(),
)


@dataclass
class Shelf:
    """A store in memory."""

    values: dict[str, str] = field(default_factory=dict)

    def answer(self, ask: Ask) -> str | None:
        if ask.kind == "put":
            return self.values.setdefault(ask.key, ask.value)
        if ask.kind == "add":
            self.values[ask.key] = str(int(self.values.get(ask.key, "0")) + 1)
        return self.values.get(ask.key)


@dataclass
class Rank:
    """One rank; `moves` yields before each request, so that a schedule can interleave ranks."""

    rank: int
    num_ranks: int
    shelf: Shelf
    wishes: dict[int, str] = field(default_factory=dict)
    """What it wishes for from a boundary on, until it is settled."""
    refuses: frozenset[str] = frozenset()
    boundary: int = 0
    standing: Standing = field(default_factory=Standing)
    made: list[tuple[int, str]] = field(default_factory=list)
    """Boundary and change."""
    verdicts: dict[int, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def moves(self, last: int) -> Iterator[None]:
        for self.boundary in range(1, last + 1):
            yield
            for _ in range(16):
                meeting = yield from self._talk()
                if meeting.verdict is None:
                    break

    def _talk(self) -> Iterator[None]:
        talk = meet(
            self.standing,
            boundary=self.boundary,
            rank=self.rank,
            num_ranks=self.num_ranks,
            wish=next((w for at, w in self.wishes.items() if at <= self.boundary), None),
            objection=lambda change: "not here" if change in self.refuses else None,
        )
        reply = None
        try:
            while True:
                ask = talk.send(reply)
                yield
                reply = self.shelf.answer(ask)
        except StopIteration as end:
            self._follow(end.value)
            return end.value

    def _follow(self, meeting: Meeting) -> None:
        if meeting.verdict is not None:
            self.verdicts[self.standing.number] = meeting.verdict
            self.reasons.append(meeting.reason)
            change = meeting.proposal.change
            if meeting.verdict == "agreed":
                self.made.append((self.boundary, change))
            if meeting.verdict != "late":
                self.wishes = {at: w for at, w in self.wishes.items() if w != change}
        self.standing = meeting.standing


def in_step(ranks: list[Rank], boundaries: int) -> None:
    """Runs ranks as collectives would let them: each boundary of all before the next of any."""
    running = [rank.moves(boundaries) for rank in ranks]
    for boundary in range(1, boundaries + 1):
        for rank, moves in zip(ranks, running, strict=True):
            while rank.boundary <= boundary and next(moves, "end") is None:
                pass


def make_ranks(number: int, **wishes: dict[int, str]) -> list[Rank]:
    shelf = Shelf()
    return [
        Rank(rank=i, num_ranks=number, shelf=shelf, wishes=dict(wishes.get(f"rank{i}", {})))
        for i in range(number)
    ]


def one_schedule(draw: random.Random) -> list[Rank]:
    """Runs ranks that ask, refuse, lag and die as it comes."""
    number, boundaries = draw.randint(2, 4), draw.randint(1, 14)
    ranks = make_ranks(number)
    for rank in ranks:
        for _ in range(draw.randint(0, 2)):
            rank.wishes[draw.randint(1, boundaries)] = draw.choice("abc")
        rank.refuses = frozenset(draw.choice(["", "", "a"]))
    dies_after = [draw.choice((20, 80, 10_000)) for _ in ranks]
    running = {rank.rank: rank.moves(boundaries) for rank in ranks}
    moves, turn, burst = 0, 0, draw.choice((1, 4, 30))
    while running:
        if moves % burst == 0 or turn not in running:
            turn = draw.choice(sorted(running))
        moves += 1
        if dies_after[turn] < moves and draw.random() < 0.1:
            running.pop(turn)  # in the middle of whatever it was doing
        elif next(running[turn], "end") is not None:
            running.pop(turn)
    return ranks


def test_ranks_never_differ_whatever_the_schedule() -> None:
    verdicts: Counter[str] = Counter()
    for seed in range(3000):
        ranks = one_schedule(random.Random(seed))
        for one, other in itertools.combinations(ranks, 2):
            shared = one.verdicts.keys() & other.verdicts.keys()
            assert all(one.verdicts[n] == other.verdicts[n] for n in shared), seed
            end = min(one.boundary, other.boundary)  # where one of them may still be at work
            assert [m for m in one.made if m[0] < end] == [m for m in other.made if m[0] < end], (
                seed
            )
        verdicts.update(ranks[0].verdicts.values())
    assert min(verdicts[v] for v in ("agreed", "refused", "late")) > 100, verdicts


@given(
    number=st.integers(2, 5),
    asks=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_a_wish_comes_on_all_ranks_that_collectives_keep_together(
    number: int, asks: int, order: object
) -> None:
    ranks = make_ranks(number, rank0={asks: "a"}, rank1={asks: "a"})
    order.shuffle(ranks)
    in_step(ranks, asks + DISTANCE)
    assert {tuple(rank.made) for rank in ranks} == {((asks + DISTANCE, "a"),)}
    assert all(rank.wishes == {} for rank in ranks)


def test_wishes_of_several_ranks_come_one_after_the_other() -> None:
    ranks = make_ranks(3, rank0={1: "a"}, rank2={1: "b"})
    in_step(ranks, 3 * DISTANCE)
    assert {tuple(rank.made) for rank in ranks} == {((5, "a"), (9, "b"))}


def test_what_one_rank_cannot_do_comes_on_none() -> None:
    ranks = make_ranks(3, rank0={1: "a"})
    ranks[1].refuses = frozenset("a")
    in_step(ranks, 2 * DISTANCE)
    assert [rank.made for rank in ranks] == [[], [], []]
    assert all(rank.verdicts == {0: "refused"} for rank in ranks)
    assert all(rank.reasons == ["rank 1: not here"] for rank in ranks)
    assert ranks[0].wishes == {}


def test_a_rank_that_has_finished_is_named_and_waited_for_by_nobody() -> None:
    ranks = make_ranks(3, rank0={1: "a"})
    in_step(ranks[:2], 6 * DISTANCE)
    assert [rank.made for rank in ranks] == [[], [], []]
    assert ranks[0].reasons == ["no answer in time from rank 2"] * 2
    assert ranks[0].standing.distance == 4 * DISTANCE


def test_a_rank_far_ahead_is_met_by_a_larger_distance() -> None:
    """As hosts of asynchronous devices may be."""
    ahead, behind = make_ranks(2, rank1={1: "a"})
    hasty, slow = ahead.moves(400), behind.moves(400)
    while behind.boundary < 350:
        while ahead.boundary < behind.boundary + 20 and next(hasty, "end") is None:
            pass
        before = behind.boundary
        while behind.boundary == before and next(slow, "end") is None:
            pass
    assert ahead.made == behind.made != []
    assert set(ahead.verdicts.values()) == {"late", "agreed"}


def test_the_distance_has_an_end() -> None:
    (alone,) = make_ranks(2, rank0={1: "a"})[:1]
    in_step([alone], 9 * DISTANCE_MAX)
    assert alone.standing.distance == DISTANCE_MAX


@pytest.mark.parametrize(
    "change",
    [
        Change(kind="switch", policy=RECOMPUTE, reason="by call"),
        Change(kind="pin", reason="", policy=OWN),
        Change(kind="rollback", steps=2, reason="slow", by_controller=True),
        Change(kind="rollback", reason="gate", rejected=(("selective", 9, "slowdown"),)),
        Change(kind="unpin", reason="by an operator"),
    ],
    ids=lambda change: change.kind,
)
def test_a_change_comes_back_from_plain_types(change: Change) -> None:
    assert change_from_plain(json.loads(json.dumps(change_to_plain(change)))) == change

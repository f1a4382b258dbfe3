"""How ranks agree on a change without waiting for each other: a protocol over a key-value store.

A round has one proposal, the first that is put into the store, with a boundary to come. A rank
that sees it no later than at that boundary answers. The first rank that reaches the boundary puts
the verdict, `agreed` only if every rank has answered yes by then, and the others take that verdict
over. So nobody waits, and two ranks never differ: a rank that passed the boundary without having
seen the proposal has not answered and never will, so that the verdict cannot be `agreed`.

Where the verdict is `late` the change is proposed again with twice the distance. A rank that has
died or has finished leaves every round `late`.

The functions are generators that yield what they ask of the store, and so know no store. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

DISTANCE = 4
"""Boundaries from a proposal to its change: ranks under collectives are one apart, and asynchronous
devices let their hosts run a little further ahead."""

DISTANCE_MAX = 1024
"""The distance doubles no further."""

Verdict = Literal["agreed", "refused", "late"]


class Ask(NamedTuple):
    """One request to the store, which never waits.

    `read` is answered with the value or None, `put` (if the key is not there) with the value that
    is there afterwards, `add` (one to a counter) with the sum.
    """

    kind: Literal["read", "put", "add"]
    key: str
    value: str = ""


Talk = Generator[Ask, str | None, "Meeting"]


class Proposal(NamedTuple):
    """A change that a rank has proposed."""

    rank: int
    """Who."""
    boundary: int
    """When, in boundaries since the session began."""
    change: str
    """What, as text."""


class Standing(NamedTuple):
    """What a rank knows of the round."""

    number: int = 0
    """Number of the round."""
    distance: int = DISTANCE
    """Distance of the next proposal."""
    proposal: Proposal | None = None
    """The proposal of the round, if the rank has seen one."""


class Meeting(NamedTuple):
    """What came of one look into the store."""

    standing: Standing
    """What the rank knows now."""
    proposal: Proposal | None = None
    """The proposal that was seen for the first time, or that is due."""
    verdict: Verdict | None = None
    """The verdict, if one is due."""
    reason: str = ""
    """Why it was refused, or which ranks did not answer in time."""


def meet(
    standing: Standing,
    *,
    boundary: int,
    rank: int,
    num_ranks: int,
    wish: str | None,
    objection: Callable[[str], str | None],
) -> Talk:
    """Looks for a proposal, answers it, makes one, or reads the verdict of one that is due.

    Args:
        standing: What the rank knew before.
        boundary: Number of the boundary that the rank is at.
        rank: The rank.
        num_ranks: How many there are.
        wish: A change that this rank would propose.
        objection: Returns why this rank cannot make a change, None if it can.
    """
    number, proposal = standing.number, standing.proposal
    is_new = proposal is None
    if proposal is None:
        text = yield Ask("read", f"{number}/proposal")
        if text is None:
            if wish is None:
                return Meeting(standing)
            mine = Proposal(rank, boundary + standing.distance, wish)
            text = yield Ask("put", f"{number}/proposal", _to_text(mine))
        assert text is not None
        proposal = _from_text(text)
        standing = standing._replace(proposal=proposal)
        if boundary <= proposal.boundary:
            yield from _answer(number, rank, objection(proposal.change))
    if boundary < proposal.boundary:
        return Meeting(standing, proposal if is_new else None)
    return (yield from _verdict(standing, proposal, num_ranks))


def _to_text(proposal: Proposal) -> str:
    return f"{proposal.rank} {proposal.boundary} {proposal.change}"


def _from_text(text: str) -> Proposal:
    rank, boundary, change = text.split(" ", 2)
    return Proposal(int(rank), int(boundary), change)


def _answer(number: int, rank: int, objection: str | None) -> Generator[Ask, str | None, None]:
    yield Ask("put", f"{number}/seen/{rank}", "1")
    if objection is None:
        yield Ask("add", f"{number}/yes")
    else:
        yield Ask("put", f"{number}/no", f"rank {rank}: {objection}")


def _verdict(standing: Standing, proposal: Proposal, num_ranks: int) -> Talk:
    number = standing.number
    num_yes = int((yield Ask("read", f"{number}/yes")) or 0)
    refusal = yield Ask("read", f"{number}/no")
    mine: Verdict = "refused" if refusal else "late"
    if num_yes == num_ranks:
        mine = "agreed"
    verdict = yield Ask("put", f"{number}/verdict", mine)
    distance, reason = DISTANCE, ""
    if verdict == "refused":
        reason = (yield Ask("read", f"{number}/no")) or ""
    elif verdict == "late":
        distance = min(2 * standing.distance, DISTANCE_MAX)
        reason = yield from _missing(number, num_ranks)
    after = Standing(number=number + 1, distance=distance)
    return Meeting(after, proposal, verdict, reason)  # type: ignore[arg-type] # one of ours


def _missing(number: int, num_ranks: int) -> Generator[Ask, str | None, str]:
    missing: list[str] = []
    for rank in range(num_ranks):
        if len(missing) == 8:
            missing.append("...")
            break
        if (yield Ask("read", f"{number}/seen/{rank}")) is None:
            missing.append(str(rank))
    return f"no answer in time from rank {', '.join(missing)}" if missing else "an answer came late"

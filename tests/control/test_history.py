"""The history of policies: switch, roll back, pin, unpin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.control import History, HistoryEntry, pinned, rolled_back, switched, unpinned
from rematic.policy import KEEP, PLANNED, RECOMPUTE, Policy

FIRST = History(entries=(HistoryEntry(policy=PLANNED, step=0, reason="first"),))
TWO = switched(FIRST, KEEP, step=3, reason="why not")
THREE = switched(TWO, RECOMPUTE, step=5, reason="too much")


def test_a_switch_puts_another_policy_in_force_and_remembers_why() -> None:
    assert FIRST.current == PLANNED
    assert THREE.current == RECOMPUTE
    assert THREE.entries[-1] == HistoryEntry(policy=RECOMPUTE, step=5, reason="too much")
    assert THREE.entries[:2] == TWO.entries
    assert TWO.current == KEEP, "histories are values"


def test_a_rollback_goes_back_so_many_switches() -> None:
    assert rolled_back(THREE, steps=1) == TWO
    assert rolled_back(THREE, steps=2) == FIRST


REFUSED: dict[str, tuple[Callable[[], History], str]] = {
    "none to roll back": (
        lambda: rolled_back(FIRST, steps=1),
        r"^cannot roll back 1 switches: there were none, 'planned' is the first policy\.$",
    ),
    "too many": (
        lambda: rolled_back(THREE, steps=3),
        r"^cannot roll back 3 switches: expected a number from 1 to 2, the switches so far\.$",
    ),
    "zero": (lambda: rolled_back(THREE, steps=0), r"^cannot roll back 0 switches: "),
    "no number": (lambda: rolled_back(THREE, steps="2"), r"^cannot roll back '2' switches: "),  # type: ignore[arg-type]
    "half of one": (lambda: rolled_back(THREE, steps=1.0), r"^cannot roll back 1\.0 switches: "),  # type: ignore[arg-type]
    "a truth": (lambda: rolled_back(THREE, steps=True), r"^cannot roll back True switches: "),
    "negative": (lambda: rolled_back(THREE, steps=-1), r"^cannot roll back -1 switches: "),
    "switch while pinned": (
        lambda: switched(pinned(TWO, KEEP, step=4, reason=""), RECOMPUTE, step=4, reason=""),
        r"^cannot switch to 'recompute': the policy 'keep' is pinned\. Call `unpin` first\.$",
    ),
    "roll back while pinned": (
        lambda: rolled_back(pinned(TWO, KEEP, step=4, reason=""), steps=1),
        r"^cannot roll back 1 switches: the policy 'keep' is pinned\. Call `unpin` first\.$",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused(change: Callable[[], History], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


def test_pinning_the_policy_in_force_makes_no_entry() -> None:
    held = pinned(TWO, KEEP, step=4, reason="hold")
    assert held == dataclasses.replace(TWO, pinned=True)
    assert unpinned(held) == TWO


def test_pinning_another_policy_switches_to_it_also_from_a_pin() -> None:
    held = pinned(pinned(TWO, KEEP, step=4, reason=""), RECOMPUTE, step=5, reason="hold")
    assert held.current == RECOMPUTE
    assert held.pinned
    assert rolled_back(unpinned(held), steps=1) == TWO


@given(st.lists(st.sampled_from([PLANNED, KEEP, RECOMPUTE]), max_size=6), st.data())
def test_rolling_back_undoes_switches_exactly(policies: list[Policy], data: st.DataObject) -> None:
    histories = [FIRST]
    for step, policy in enumerate(policies):
        histories.append(switched(histories[-1], policy, step=step, reason=str(step)))
    if policies:
        steps = data.draw(st.integers(1, len(policies)))
        assert rolled_back(histories[-1], steps=steps) == histories[-1 - steps]

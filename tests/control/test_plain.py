"""The history of policies to plain types and back."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rematic.control import (
    History,
    HistoryEntry,
    history_from_plain,
    history_to_plain,
    pinned,
    switched,
)
from rematic.policy import KEEP, PLANNED, Keep, Policy, Recompute, Rule

OWN = Policy(
    name="own",
    rules=(
        Rule(pattern="*.[0-3]", action=Recompute()),
        Rule(pattern="Block", action=Keep(), last=2),
    ),
    default=Keep(),
)
_entries = st.builds(
    HistoryEntry,
    policy=st.sampled_from([PLANNED, KEEP, OWN]),
    step=st.integers(0, 1 << 40),
    reason=st.text(max_size=20),
)


@given(st.lists(_entries, min_size=1, max_size=5).map(tuple), st.booleans())
def test_a_history_survives_the_way_through_plain_types(
    entries: tuple[HistoryEntry, ...], is_pinned: bool
) -> None:
    history = History(entries=entries, pinned=is_pinned)
    plain = history_to_plain(history)
    assert history_from_plain(json.loads(json.dumps(plain))) == history


def test_a_policy_with_rules_of_its_own_is_whole_after_it() -> None:
    first = History(entries=(HistoryEntry(policy=PLANNED, step=0, reason=""),))
    history = pinned(switched(first, OWN, step=1, reason="x"), OWN, step=2, reason="y")
    assert history_from_plain(history_to_plain(history)).current == OWN

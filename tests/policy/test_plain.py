"""Policies to plain types and back, for checkpoints that load under `weights_only`."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rematic.policy import (
    ACTIONS,
    Action,
    Policy,
    Rule,
    Tile,
    action_named,
    policy_from_plain,
    policy_to_plain,
)

_positive = st.integers(1, 9)
_tiles = st.fixed_dictionaries(
    {"dim": st.integers(-3, 3)}, optional={"num_tiles": st.integers(1, 9)}
).map(lambda options: Tile(**options))
_actions: st.SearchStrategy[Action] = st.one_of(
    st.sampled_from(sorted(ACTIONS)).map(action_named), _tiles
)
_ends = st.fixed_dictionaries({}, optional={"first": _positive, "last": _positive})
_share = st.tuples(_positive, _positive).map(lambda pair: {"share": (min(pair), max(pair))})
_span = st.tuples(st.integers(0, 4), _positive).map(lambda p: {"span": (p[0], p[0] + p[1])})
_positions = st.one_of(_ends, _share, _span, _positive.map(lambda n: {"every": n}))


@st.composite
def _rules(draw: st.DrawFn) -> Rule:
    exclude = draw(st.lists(st.text(min_size=1, max_size=5), max_size=2))
    return Rule(
        pattern=draw(st.text(max_size=10)),
        action=draw(_actions),
        exclude=tuple(exclude),
        **draw(_positions),
    )


policies = st.builds(
    Policy,
    name=st.text(max_size=10),
    rules=st.lists(_rules(), max_size=3).map(tuple),
    default=st.none() | _actions,
)


@given(policies)
def test_a_policy_survives_the_way_through_plain_types(policy: Policy) -> None:
    plain = policy_to_plain(policy)
    assert policy_from_plain(json.loads(json.dumps(plain))) == policy

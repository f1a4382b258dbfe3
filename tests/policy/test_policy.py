"""Policies resolve to exactly one action per unit."""

from __future__ import annotations

import pytest

from rematic.policy import (
    COMPRESS,
    KEEP,
    LADDER,
    PLANNED,
    RECOMPUTE,
    Action,
    Compress,
    Keep,
    Plan,
    Policy,
    Recompute,
    Rule,
    lossless,
    policy_named,
    resolve,
)

UNITS = {
    **{f"encoder.layers.{i}": "EncoderLayer" for i in range(3)},
    **{f"decoder.layers.{i}": "DecoderLayer" for i in range(2)},
}
K, R = Keep(), Recompute()


def _rule(pattern: str, action: Action) -> Rule:
    return Rule(pattern=pattern, action=action)


RESOLVED: dict[str, tuple[Policy, tuple[Action | None, ...]]] = {
    "keep": (KEEP, (K, K, K, K, K)),
    "recompute": (RECOMPUTE, (R, R, R, R, R)),
    "planned": (PLANNED, (None,) * 5),
    "one rule": (
        Policy(name="p", rules=(_rule("encoder.*", R),), default=K),
        (R, R, R, K, K),
    ),
    "class": (
        Policy(name="p", rules=(_rule("DecoderLayer", K),)),
        (None, None, None, K, K),
    ),
    "the last rule decides": (
        Policy(name="p", rules=(_rule("*", R), _rule("*.0", K), _rule("decoder.layers.0", R))),
        (K, R, R, R, R),
    ),
    "in another order": (
        Policy(name="p", rules=(_rule("decoder.layers.0", R), _rule("*.0", K), _rule("*", R))),
        (R, R, R, R, R),
    ),
    "set of digits": (
        Policy(name="p", rules=(_rule("*.[12]", R),), default=K),
        (K, R, R, K, R),
    ),
}


@pytest.mark.parametrize(("policy", "actions"), RESOLVED.values(), ids=RESOLVED.keys())
def test_a_policy_gives_every_unit_one_action(
    policy: Policy, actions: tuple[Action | None, ...]
) -> None:
    assert resolve(policy, UNITS) == actions


def test_a_rule_that_matches_no_unit_is_an_error() -> None:
    policy = Policy(name="p", rules=(_rule("encoder.layer.*", R),))
    message = (
        r"^pattern 'encoder\.layer\.\*' matches none of the 5 modules: expected a glob over "
        r"qualified names or a class name\. Near: encoder\.layers\.\d"
    )
    with pytest.raises(ValueError, match=message):
        resolve(policy, UNITS)


def test_policies_are_found_by_name_or_passed_through() -> None:
    own = Policy(name="own", default=K)
    assert [policy_named(p) for p in ("keep", "recompute", "planned", own)] == [
        KEEP,
        RECOMPUTE,
        PLANNED,
        own,
    ]
    assert [policy.name for policy in LADDER] == [
        "keep",
        "selective",
        "recompute",
        "recompute+offload",
    ]


def test_an_unknown_policy_lists_those_there_are() -> None:
    message = (
        r"^unknown policy 'none': expected one of planned, keep, selective, recompute, "
        r"recompute\+offload, offload, compress, or a `rematic\."
    )
    with pytest.raises(ValueError, match=message):
        policy_named("none")


def test_a_lossy_policy_has_a_lossless_one_beside_it() -> None:
    kept = Rule(pattern="*.0", action=Keep())
    squeezed = Rule(pattern="*.1", action=Compress(), exclude=("*.11",))
    assert lossless(COMPRESS) == RECOMPUTE
    assert lossless(PLANNED) is PLANNED
    mixed = lossless(Policy(name="own", rules=(kept, squeezed)))
    assert mixed.name == "own without compress"
    assert mixed.default is None
    assert mixed.rules == (kept, Rule(pattern="*.1", action=Recompute(), exclude=("*.11",)))
    assert not mixed.is_lossy
    with_rules = lossless(Policy(name="compress", rules=(kept,), default=Compress()))
    assert (with_rules.name, with_rules.default) == ("compress without compress", Recompute())


def test_a_plan_counts_its_actions() -> None:
    plan = Plan(actions=(R, R, K))
    assert plan.num_kept == 1
    assert plan.counts() == {"recompute": 2, "keep": 1}
    assert Plan(actions=()).counts() == {}

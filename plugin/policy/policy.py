"""Policies: ordered rules with a name, resolved on a model into one action per unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rematic.policy.actions import (
    Action,
    Compress,
    Keep,
    Offload,
    Recompute,
    RecomputeOffload,
    Selective,
)
from rematic.policy.rules import Rule


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An ordered set of rules; the last one that matches a unit decides."""

    name: str
    """Name by which switches, rollbacks and the journal speak of it."""

    rules: tuple[Rule, ...] = ()
    """Rules in order."""

    default: Action | None = None
    """Action of units that no rule matches; None leaves them to the planner, batch by batch."""

    @property
    def is_lossy(self) -> bool:
        """Whether it gives some unit an action that loses precision."""
        actions = [rule.action for rule in self.rules]
        return any(isinstance(action, Compress) for action in (*actions, self.default))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The assignment unit -> action for one batch shape."""

    actions: tuple[Action, ...]
    """Action of each unit, in the order of the units."""

    @property
    def num_kept(self) -> int:
        """Number of units that start held."""
        return sum(isinstance(action, Keep) for action in self.actions)

    def counts(self) -> dict[str, int]:
        """Returns the number of units by action name."""
        names = [action.name for action in self.actions]
        return {name: names.count(name) for name in dict.fromkeys(names)}


KEEP = Policy(name="keep", default=Keep())
SELECTIVE = Policy(name="selective", default=Selective())
RECOMPUTE = Policy(name="recompute", default=Recompute())
RECOMPUTE_OFFLOAD = Policy(name="recompute+offload", default=RecomputeOffload())
OFFLOAD = Policy(name="offload", default=Offload())
COMPRESS = Policy(name="compress", default=Compress())
PLANNED = Policy(name="planned")

LADDER = (KEEP, SELECTIVE, RECOMPUTE, RECOMPUTE_OFFLOAD)
"""The default ladder, from lightest to heaviest; `planned` moves between `keep` and `recompute`."""

_NAMED = {policy.name: policy for policy in (PLANNED, *LADDER, OFFLOAD, COMPRESS)}


def policy_named(policy: str | Policy) -> Policy:
    """Returns the policy called so; a policy is returned as it is.

    Raises:
        ValueError: If there is none of that name.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in _NAMED:
        raise ValueError(
            f"unknown policy {policy!r}: expected one of {', '.join(_NAMED)}, or a "
            "`rematic.policy.Policy` with rules of your own."
        )
    return _NAMED[policy]


def lossless(policy: Policy) -> Policy:
    """Returns the policy with everything recomputed that it would compress.

    It is called `recompute` where that is all it does.
    """
    if not policy.is_lossy:
        return policy
    default = Recompute() if isinstance(policy.default, Compress) else policy.default
    rules = tuple(
        replace(rule, action=Recompute()) if isinstance(rule.action, Compress) else rule
        for rule in policy.rules
    )
    if default == Recompute() and not rules:
        return RECOMPUTE
    return Policy(name=f"{policy.name} without compress", rules=rules, default=default)


def resolve(policy: Policy, classes: Mapping[str, str]) -> tuple[Action | None, ...]:
    """Returns the action of each unit, None where the planner decides.

    Args:
        policy: The policy.
        classes: Class name of each unit by qualified name, in the order of the units.

    Raises:
        ValueError: If a rule matches no unit.
    """
    actions: dict[str, Action | None] = dict.fromkeys(classes, policy.default)
    for rule in policy.rules:
        for name in rule.select(classes):
            actions[name] = rule.action
    return tuple(actions.values())

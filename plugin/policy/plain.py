"""Policies as plain types, for checkpoints that load under `weights_only`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rematic.policy.actions import action_named
from rematic.policy.policy import Policy
from rematic.policy.rules import Rule


def policy_to_plain(policy: Policy) -> dict[str, Any]:
    """Returns the policy as dictionaries, lists and strings."""
    return {
        "name": policy.name,
        "rules": [{"match": rule.pattern, "action": rule.action.name} for rule in policy.rules],
        "default": None if policy.default is None else policy.default.name,
    }


def policy_from_plain(plain: Mapping[str, Any]) -> Policy:
    """Returns the policy that `policy_to_plain` wrote."""
    default = plain["default"]
    return Policy(
        name=plain["name"],
        rules=tuple(
            Rule(pattern=rule["match"], action=action_named(rule["action"]))
            for rule in plain["rules"]
        ),
        default=None if default is None else action_named(default),
    )

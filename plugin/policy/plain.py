"""Policies as plain types, for checkpoints that load under `weights_only`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rematic.policy.actions import Action, action_named
from rematic.policy.policy import Policy
from rematic.policy.rules import Rule

_POSITIONS = ("exclude", "first", "last", "every", "share", "span")


def policy_to_plain(policy: Policy) -> dict[str, Any]:
    """Returns the policy as dictionaries, lists and strings."""
    return {
        "name": policy.name,
        "rules": [_rule_to_plain(rule) for rule in policy.rules],
        "default": None if policy.default is None else action_to_plain(policy.default),
    }


def policy_from_plain(plain: Mapping[str, Any]) -> Policy:
    """Returns the policy that `policy_to_plain` wrote."""
    default = plain["default"]
    return Policy(
        name=plain["name"],
        rules=tuple(_rule_from_plain(rule) for rule in plain["rules"]),
        default=None if default is None else action_from_plain(default),
    )


def _rule_to_plain(rule: Rule) -> dict[str, Any]:
    positions = {name: getattr(rule, name) for name in _POSITIONS}
    given = {name: value for name, value in positions.items() if value}
    return {
        "match": rule.pattern,
        "action": action_to_plain(rule.action),
        **{name: list(v) if isinstance(v, tuple) else v for name, v in given.items()},
    }


def _rule_from_plain(plain: Mapping[str, Any]) -> Rule:
    given: dict[str, Any] = {name: plain[name] for name in _POSITIONS if name in plain}
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    return Rule(
        pattern=plain["match"],
        action=action_from_plain(plain["action"]),
        **given,
    )


def action_to_plain(action: Action) -> dict[str, Any]:
    """Returns the action as a mapping of strings, numbers and lists."""
    options = dataclasses.asdict(action)
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return {"name": action.name, **lists}


def action_from_plain(plain: Mapping[str, Any]) -> Action:
    """Returns the action that `action_to_plain` wrote."""
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items() if k != "name"}
    return action_named(plain["name"], **options)

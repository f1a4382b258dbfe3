"""What a session was attached with, as its saved state holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematic.control import ControlRules, rules_from_plain, rules_to_plain
from rematic.policy import Policy, policy_from_plain, policy_to_plain


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a session was attached with, as far as its saved state goes on from it."""

    policy: Policy
    """What it begins with, or tries after the first step."""

    budget_bytes: int | None
    """Bytes that may be in use on the device; None without a limit."""

    rules: ControlRules
    """What its controller keeps to."""

    def to_plain(self) -> dict[str, Any]:
        """Returns it as dictionaries, lists, strings and numbers."""
        return {
            "policy": policy_to_plain(self.policy),
            "budget_bytes": self.budget_bytes,
            "rules": rules_to_plain(self.rules),
        }


def configuration_from_plain(plain: Mapping[str, Any]) -> Configuration:
    """Returns the configuration that `to_plain` wrote."""
    return Configuration(
        policy=policy_from_plain(plain["policy"]),
        budget_bytes=plain["budget_bytes"],
        rules=rules_from_plain(plain["rules"]),
    )

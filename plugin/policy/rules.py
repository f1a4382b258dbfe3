"""Rules: patterns over qualified module names, and the action they give."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from rematic.policy.actions import Action


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Gives every unit that the pattern matches one action."""

    pattern: str
    """Glob over qualified names (`model.layers.*`, `*.[0-3]`) or a class name."""

    action: Action
    """What happens to the activations of the units that match."""


def match_names(pattern: str, classes: Mapping[str, str]) -> list[str]:
    """Returns the names that `pattern` matches, in the order of `classes`.

    Args:
        pattern: Glob over qualified names, or the exact name of a class.
        classes: Class name by qualified name.

    Raises:
        ValueError: If nothing matches (contract 8).
    """
    matched = [
        name
        for name, class_name in classes.items()
        if class_name == pattern or fnmatch.fnmatchcase(name, pattern)
    ]
    if not matched:
        known = [*classes, *dict.fromkeys(classes.values())]
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
        raise ValueError(
            f"pattern {pattern!r} matches none of the {len(classes)} modules: expected a glob over "
            f"qualified names or a class name. Near: {', '.join(near)}."
        )
    return matched

"""Rules: which units they speak of, and the action they give."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rematic.policy.actions import Action


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Gives every unit that it selects one action.

    The pattern selects units by name or class, `exclude` takes some away, and the others narrow
    what is left by its position; `first` and `last` may be given together.
    """

    pattern: str
    """Glob over qualified names (`model.layers.*`, `*.[0-3]`) or a class name."""

    action: Action
    """What happens to the activations of the units selected."""

    exclude: tuple[str, ...] = ()
    """Globs or class names of units that are left out."""

    first: int | None = None
    """Only so many units from the first on."""

    last: int | None = None
    """Only so many units up to the last."""

    every: int | None = None
    """Only every so-manieth unit, the first one included."""

    share: tuple[int, int] | None = None
    """Only `m` of every `n` units, spread evenly: `(5, 6)`."""

    span: tuple[int, int] | None = None
    """Only the units from one position to before another, counted from 0."""

    def __post_init__(self) -> None:
        _check_positions(self)

    def select(self, classes: Mapping[str, str]) -> list[str]:
        """Returns the names of the units that the rule speaks of, in the order of `classes`.

        Args:
            classes: Class name by qualified name.

        Raises:
            ValueError: If the pattern or an exclusion matches nothing, or no unit is left.
        """
        matched = match_names(self.pattern, classes)
        left_out = {name for pattern in self.exclude for name in match_names(pattern, classes)}
        names = [name for name in matched if name not in left_out]
        selected = [name for i, name in enumerate(names) if self._takes(i, len(names))]
        if not selected:
            raise ValueError(
                f"the rule {self} selects none of the {len(matched)} units that its pattern "
                "matches: expected at least one. Widen its positions or its exclusions."
            )
        return selected

    def _takes(self, i: int, total: int) -> bool:
        if self.first is not None or self.last is not None:
            return i < (self.first or 0) or i >= total - (self.last or 0)
        if self.every is not None:
            return i % self.every == 0
        if self.share is not None:
            m, n = self.share
            return (i + 1) * m // n > i * m // n
        if self.span is not None:
            return self.span[0] <= i < self.span[1]
        return True


def match_names(pattern: str, classes: Mapping[str, str]) -> list[str]:
    """Returns the names that `pattern` matches, in the order of `classes`.

    A pattern that matches no whole name may leave out what holds all the others, as hosts and
    adapters put it around a model: `model.layers.*` is `base_model.model.model.layers.*` too.

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
    holders = iter(_holders(classes))
    while not matched and (holder := next(holders, None)) is not None:
        whole = f"{holder}.{pattern}"
        matched = [name for name in classes if fnmatch.fnmatchcase(name, whole)]
    if not matched:
        known = [*classes, *dict.fromkeys(classes.values())]
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
        raise ValueError(
            f"pattern {pattern!r} matches none of the {len(classes)} modules: expected a glob over "
            f"qualified names or a class name. Near: {', '.join(near)}."
        )
    return matched


def _holders(names: Iterable[str]) -> list[str]:
    """Names of the modules that hold all those named, but for one another; the outermost first."""
    paths = [name.split(".") for name in names]
    longest = max(paths, key=len, default=[])
    holders = [longest[:depth] for depth in range(1, len(longest))]
    shared = [
        holder
        for holder in holders
        if all(path[: len(holder)] == holder or holder[: len(path)] == path for path in paths)
    ]
    return [".".join(holder) for holder in shared]


def _check_positions(rule: Rule) -> None:
    by_ends = rule.first is not None or rule.last is not None
    given = [by_ends, rule.every is not None, rule.share is not None, rule.span is not None]
    if sum(given) > 1:
        raise ValueError(
            f"the rule for {rule.pattern!r} has more than one position: expected first and last, "
            "or every, or share, or span. Split it into two rules."
        )
    for name in ("first", "last", "every"):
        _require(rule, name, [getattr(rule, name)], "a whole number above 0")
    if rule.share is not None:
        m, n = rule.share
        _require(rule, "share", [m, n, n - m + 1], "two whole numbers, 0 < m <= n")
    if rule.span is not None:
        start, stop = rule.span
        _require(rule, "span", [start + 1, stop - start], "two whole numbers, 0 <= start < stop")


def _require(rule: Rule, name: str, values: Sequence[int | None], expected: str) -> None:
    if any(value is not None and value < 1 for value in values):
        raise ValueError(
            f"the rule for {rule.pattern!r} has {name} {getattr(rule, name)}: expected {expected}."
        )

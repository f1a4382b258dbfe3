"""What became of trials of `fault_sweep.py`: counted, added up, saved so that a sweep goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fault_trials import Setting

COMPLETE = ("op+unit", "all")
"""Levels that leave no failure without an answer."""
KEYS = ("positions", "recovered", "stopped_cleanly", "wrong")
Row = dict[str, int]


@dataclass(kw_only=True)
class Tally:
    """What became of the trials of one setting."""

    setting: Setting
    counts: Counter[str] = field(default_factory=Counter)
    """By outcome, and `inside_units` with `inside_units_recovered`."""
    examples: list[str] = field(default_factory=list)
    """What is not as it must be, in words."""

    def add(self, outcome: str, where: str, *, in_unit: bool = False) -> None:
        """Counts one trial."""
        kind = outcome.split(":")[0]
        self.counts.update({"positions": 1, kind: 1})
        if in_unit:
            self.counts.update({"inside_units": 1, "inside_units_recovered": kind == "recovered"})
        must_recover = self.setting.level in COMPLETE or (in_unit and "unit" in self.setting.level)
        if kind == "wrong" or (must_recover and kind != "recovered"):
            self.examples.append(f"{self.setting}, {where}: {outcome}")


class SavedTallies:
    """A file of tallies, a line each, to which a sweep adds and from which it goes on.

    Args:
        path: The file; None for none.
        options: What a tally depends on beside its number. A file of others is refused.
        resume: Whether to go on from what the file holds, instead of beginning it anew.

    Raises:
        ValueError: If the file was written with other options.
    """

    def __init__(self, path: Path | None, options: dict[str, object], *, resume: bool) -> None:
        self._path = path
        self.found: dict[int, Tally] = {}
        """By number, in the order of the sweep."""
        if path is None:
            return
        header = json.dumps(options)
        if resume and path.exists():
            first, *lines = path.read_text("utf-8").splitlines()
            if first != header:
                raise ValueError(
                    f"{path} holds a sweep with {first}, and this one has {header}. Give the same "
                    "options, or another --out."
                )
            for line in lines:
                row = json.loads(line)
                setting, counts = Setting(**row["setting"]), Counter(row["counts"])
                tally = Tally(setting=setting, counts=counts, examples=row["examples"])
                self.found[row["number"]] = tally
        else:
            path.write_text(header + "\n", "utf-8")

    def add(self, number: int, tally: Tally) -> None:
        """Keeps one more."""
        self.found[number] = tally
        if self._path is not None:
            row = {"number": number, **vars(tally), "setting": vars(tally.setting)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def summary(tallies: Iterable[Tally]) -> dict[str, object]:
    """Adds up, in all and by what the settings differ in."""
    tallies = list(tallies)
    examples = [example for tally in tallies for example in tally.examples]
    groups: dict[str, object] = {}
    for key in ("model", "action", "level", "accumulate", "autocast", "kind"):
        names = dict.fromkeys(str(getattr(tally.setting, key)) for tally in tallies)
        if len(names) > 1:
            groups[f"by_{key}"] = {
                name: total(t for t in tallies if str(getattr(t.setting, key)) == name)
                for name in names
            }
    complete = [tally for tally in tallies if tally.setting.level in COMPLETE]
    return {
        **total(tallies),
        "with_every_answer": total(complete),
        **groups,
        "not_as_it_must_be": len(examples),
        "examples": examples[:20],
    }


def total(tallies: Iterable[Tally]) -> Row:
    """Adds up the counts."""
    counts: Counter[str] = Counter()
    for tally in tallies:
        counts.update(tally.counts)
    inside = ("inside_units", "inside_units_recovered") if counts["inside_units"] else ()
    return {key: counts[key] for key in (*KEYS, *inside)}

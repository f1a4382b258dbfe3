"""A slice of benchmarks/fault_sweep.py: memory runs out somewhere in whole steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_models import FAMILIES
from benchmarks.fault_sweep import (
    LOSSLESS_AND_COMPRESS,
    main,
    random_trial,
    sweep,
    sweep_budgets,
)
from benchmarks.fault_tallies import Tally, summary
from benchmarks.fault_trials import KINDS, LEVELS, Setting, Trials


def setting(**changes: Any) -> Setting:
    return Setting(**{"model": "tied", "action": "keep", "level": "all", **changes})


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_alone_and_all_together(level: str) -> None:
    tally = sweep(setting(level=level), limit=4)
    assert tally.examples == []
    assert tally.counts["recovered"] > 0
    assert (tally.counts["stopped_cleanly"] == 0) == (level in ("op", "op+unit", "all"))


def test_units_answer_every_failure_inside_them() -> None:
    tally = sweep(setting(action="recompute", level="unit"), stages=(2,), limit=20)
    assert tally.examples == []
    assert tally.counts["inside_units"] == tally.counts["inside_units_recovered"] > 0


@pytest.mark.parametrize(("offset", "family"), list(enumerate(FAMILIES)))
def test_every_failure_is_recovered_with_all_answers(offset: int, family: str) -> None:
    """Each family under another action, each kind of failure, fp32 and bf16."""
    action = LOSSLESS_AND_COMPRESS[offset]
    for i, kind in enumerate(KINDS):
        one = setting(
            model=family, action=action, level="all", accumulate=3, kind=kind, autocast=i == 0
        )
        tally = sweep(one, stages=(1, 3), limit=2, offset=offset + i)
        assert tally.examples == []
        assert tally.counts["recovered"] == tally.counts["positions"] > 0


def test_slices_are_recovered_to_the_bits_of_slices() -> None:
    tally = sweep(setting(model="llama", action="tile", level="op+unit"), stages=(1,), limit=6)
    assert tally.examples == []
    assert tally.counts["recovered"] == tally.counts["positions"] > 0


def test_budgets_that_a_heavier_plan_meets() -> None:
    tally = sweep_budgets(setting(), number=3)
    assert tally.examples == []
    assert tally.counts["recovered"] == 3


def test_several_failures() -> None:
    for seed in range(5):
        tally = random_trial(seed, models=["tied", "mlp"], actions=["keep", "recompute"])
        assert tally.examples == []


def test_a_run_without_failures_is_the_plain_one() -> None:
    with Trials(setting(action="compress", accumulate=3)) as trials:
        assert len(trials.survey_all()) > 1000


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators that are not put back are one of the ways to be wrong."""
    monkeypatch.setattr("rematic.transaction.step_transaction._generator_states", lambda *_: [])
    tally = sweep(setting(level="step"), stages=(2,), limit=8)
    assert tally.counts["wrong"]
    assert tally.examples


def test_what_must_recover_and_does_not_is_counted_as_well() -> None:
    for level, in_unit, is_seen in [
        ("all", False, True),
        ("unit", True, True),
        ("op", True, False),
    ]:
        tally = Tally(setting=setting(level=level))
        tally.add("stopped_cleanly", "op 3", in_unit=in_unit)
        assert bool(tally.examples) is is_seen
        assert summary([tally])["not_as_it_must_be"] == int(is_seen)


def test_the_line_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["units", "--json", "--limit", "2", "--models", "mlp", "--actions", "keep"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["positions"] == sum(found[k] for k in ("recovered", "stopped_cleanly", "wrong"))
    assert found["by_level"]["op+unit"]["recovered"] == found["by_level"]["op+unit"]["positions"]


def test_a_sweep_goes_on_from_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tallies"
    line = ["random", "--json", "--models", "mlp", "--actions", "keep", "--out", str(out)]
    assert main([*line, "--seeds", "1"]) == 0
    first = out.read_text()
    assert main([*line, "--seeds", "3", "--resume"]) == 0
    assert out.read_text().startswith(first)
    whole = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(whole)["positions"] == 3
    assert main([*line[:-2], "--seeds", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == whole
    line[line.index("keep")] = "recompute"
    with pytest.raises(ValueError, match=r"Give the same options, or another --out"):
        main([*line, "--seeds", "3", "--resume"])

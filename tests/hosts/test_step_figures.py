"""The figures for loggers and trackers: their names and units are those of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rematic.hosts.step_figures import PREFIX, StepFigures, policy_level
from rematic.memory import MemorySnapshot
from rematic.step_record import StepRecord

PAGE = Path(__file__).resolve().parents[2] / "docs" / "control.md"


def record(**changes: object) -> StepRecord:
    """Returns a step."""
    figures: dict[str, object] = {
        "step": 0,
        "batch": 1,
        "length": 8,
        "tokens": 8,
        "padded": False,
        "policy": "planned",
        "pinned": False,
        "depth": 0,
        "plan": {"keep": 2, "recompute": 1, "offload": 1},
        "predicted_peak_bytes": 90,
        "peak_bytes": 100,
        "peak_source": "unit ends",
        "budget_bytes": 200,
        "before": MemorySnapshot(),
        "after": MemorySnapshot(),
        "seconds": 0.5,
        "evictions": 0,
        "evicted_bytes": 0,
        "op_retries": 0,
        "unit_retries": 0,
        "step_retries": 0,
        "replays": 2,
        "armed": False,
        "reason": "",
        "planned_by": "model",
        "predicted_seconds": 0.4,
    }
    return StepRecord(**{**figures, **changes})  # type: ignore[arg-type]


def test_every_figure_is_in_the_docs_with_its_unit() -> None:
    figures = StepFigures()
    figures.add(record())
    made = {re.sub("units/.*", "units/ACTION", name) for name in figures.take()}
    rows = re.findall(rf"^\| `({PREFIX}[^`]+)` \| ([^|]+) \| ", PAGE.read_text("utf-8"), re.M)
    assert {name for name, _ in rows} == made
    assert {unit.strip() for _, unit in rows} == {"bytes", "seconds", "count", "units", "level"}


@pytest.mark.parametrize(
    ("plan", "level"),
    [
        ({"keep": 4}, 0.0),
        ({"selective": 2, "keep": 2}, 0.5),
        ({"recompute": 4}, 2.0),
        ({"recompute+offload": 1, "compress": 1}, 3.0),
        ({"keep": 2, "recompute": 1, "offload": 1}, 1.25),
        ({}, 0.0),
    ],
)
def test_the_level_is_the_mean_of_the_units(plan: dict[str, int], level: float) -> None:
    assert policy_level(plan) == level


def test_figures_are_taken_once() -> None:
    figures = StepFigures()
    figures.add(record(step_retries=1))
    figures.add(record(peak_bytes=150, seconds=1.0))
    taken = figures.take()
    assert taken["rematic/peak_bytes"] == 150
    assert taken["rematic/seconds"] == 1.5
    assert taken["rematic/step_retries"] == 1
    assert figures.take() == {}

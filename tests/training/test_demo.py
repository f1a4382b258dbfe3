from __future__ import annotations

import sys

import pytest

from rematic.memory import glibc
from rematic.training import demo
from rematic.training.demo import run_demo
from rematic.training.demo_figures import DemoFigures
from rematic.training.demo_report import format_demo

SMALL = (
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_hidden_layers=12",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "data.max_documents=4",
    "data.max_length=1024",
    "training.threads=1",
    "memory.budget=40MiB",
)


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def figures(told: list[str]) -> DemoFigures:
    if glibc.read_heap() is None:
        pytest.skip("the heap of this platform cannot be capped")
    return run_demo(SMALL, show=told.append)


def test_keeping_everything_dies_of_a_real_allocation_error(figures: DemoFigures) -> None:
    kept = figures.way("kept")
    (failure,) = kept.failures
    assert len(kept.documents) < 4
    assert failure.number == len(kept.documents)
    assert "DefaultCPUAllocator: can't allocate memory" in failure.error


@pytest.mark.parametrize("way", ["plain", "recomputed", "rematic"])
def test_the_others_finish_every_document_with_the_bits_of_the_plain_loop(
    figures: DemoFigures, way: str
) -> None:
    found = figures.way(way)
    assert found.failures == ()
    assert [document.number for document in found.documents] == list(range(4))
    assert found.losses_equal == 4


def test_stays_inside_the_budget_and_uses_more_of_it(figures: DemoFigures) -> None:
    peaks = [figures.way(way).peak_bytes or 0 for way in ("recomputed", "rematic")]
    assert 0 < peaks[0] < peaks[1] <= figures.budget_bytes


def test_compares_document_by_document(figures: DemoFigures) -> None:
    assert figures.seconds_ratio is not None
    assert figures.seconds_ratio_min is not None
    assert figures.seconds_ratio_max is not None
    assert figures.seconds_ratio_min <= figures.seconds_ratio <= figures.seconds_ratio_max
    assert "time of (c) over (b)" in format_demo(figures)


def test_tells_what_it_does_all_the_time(told: list[str], figures: DemoFigures) -> None:
    assert figures.num_documents == 4
    for part in (1, 2, 3):
        assert any(text.startswith(f"[{part}/3] ") for text in told)
    assert any("document 4 of 4" in text for text in told)
    assert any("failed: " in text for text in told)


def test_passes_on_why_a_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="the demo caps the heap at it and needs a size"):
        run_demo(["memory.budget=0.9", "data.max_documents=1"], show=lambda text: None)


def test_says_how_a_part_died(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('something odd', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(demo, "COMMAND", (sys.executable, "-c", program))
    with pytest.raises(RuntimeError) as caught:
        run_demo(show=lambda text: None)
    assert str(caught.value).splitlines() == [
        "the part 'plain' of the demo ended with exit code 3; it was expected to finish:",
        "something odd",
    ]

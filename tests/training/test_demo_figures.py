from __future__ import annotations

import dataclasses
import json

import pytest

from rematic.training.demo_figures import DemoFigures, DocumentFigures, Failure, compare
from rematic.training.demo_report import format_demo

MIB = 1 << 20
LENGTHS = (100, 1000, 50)


def document(number: int, *, seconds: float, loss: float = 2.0, **more: int) -> DocumentFigures:
    return DocumentFigures(
        number=number,
        length=LENGTHS[number],
        loss_hex=(loss + number).hex(),
        seconds=seconds,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def figures() -> DemoFigures:
    recomputed = [document(n, seconds=2.0 + n, peak_bytes=(60 + n) * MIB) for n in range(3)]
    rematic = [
        document(0, seconds=1.0, peak_bytes=80 * MIB),
        document(1, seconds=3.0, peak_bytes=99 * MIB, evictions=4, op_retries=1, unit_retries=1),
        document(2, seconds=3.0, loss=2.5, peak_bytes=70 * MIB),
    ]
    failure = Failure(number=1, name="LAMBDAS", length=1000, error="DefaultCPUAllocator: no")
    return compare(
        {
            "plain": [document(n, seconds=1.0) for n in range(3)],
            "kept": [document(0, seconds=1.5)],
            "recomputed": recomputed,
            "rematic": rematic,
        },
        {"kept": [failure]},
        lengths=LENGTHS,
        max_length=1000,
        budget_bytes=100 * MIB,
        corpus_sha256="ab" * 32,
    )


def test_counts_losses_that_are_equal_to_the_last_bit(figures: DemoFigures) -> None:
    equal = {way.way: (way.losses_equal, len(way.documents)) for way in figures.ways}
    assert equal == {"plain": (3, 3), "kept": (1, 1), "recomputed": (3, 3), "rematic": (2, 3)}


def test_compares_the_times_document_by_document(figures: DemoFigures) -> None:
    assert figures.seconds_ratio == pytest.approx(7 / 9)
    assert figures.seconds_ratio_median == pytest.approx(0.75)
    assert figures.seconds_ratio_min == pytest.approx(0.5)
    assert figures.seconds_ratio_max == pytest.approx(1.0)


def test_only_documents_that_both_trained_are_compared() -> None:
    figures = compare(
        {"recomputed": [document(0, seconds=2.0)], "rematic": [document(1, seconds=1.0)]},
        {},
        lengths=LENGTHS,
        max_length=1000,
        budget_bytes=MIB,
        corpus_sha256="x",
    )
    assert figures.seconds_ratio is None
    assert figures.way("plain").documents == ()


def test_is_plain_for_json(figures: DemoFigures) -> None:
    plain = json.loads(json.dumps(figures.to_dict()))
    assert plain["ways"][3]["evictions"] == 4
    assert plain["ways"][1]["failures"][0]["name"] == "LAMBDAS"


def test_prints_the_ways_side_by_side(figures: DemoFigures) -> None:
    assert format_demo(figures).splitlines() == [
        "3 documents of Python's own documentation, 1,150 tokens, cut at 1,000; one epoch",
        "budget 100.0 MiB, the heap really capped; without a cap the plain loop takes 3 s",
        "",
        "                             (a) everything kept  (b) everything recomputed  (c) rematic",
        "---------------------------  -------------------  -------------------------  -----------",
        "documents finished                        1 of 3                     3 of 3       3 of 3",
        "batches lost                                   2                          0            0",
        "losses bit-equal to plain                 1 of 1                     3 of 3       2 of 3",
        "peak in use                                    -                   62.0 MiB     99.0 MiB",
        "evictions                                      -                          0            4",
        "failed allocations answered                    -                          0            2",
        "seconds                                      1.5                        9.0          7.0",
        "",
        "(a) everything kept failed at document 2 ('LAMBDAS', 1,000 tokens):",
        "    DefaultCPUAllocator: no",
        "",
        "time of (c) over (b): 0.778 in all; per document median 0.750, from 0.500 to 1.000",
    ]


def test_says_when_everything_fits(figures: DemoFigures) -> None:
    kept = dataclasses.replace(figures.way("kept"), failures=())
    ways = tuple(kept if way.way == "kept" else way for way in figures.ways)
    text = format_demo(dataclasses.replace(figures, ways=ways))
    assert "(a) everything kept fits into this budget: set memory.budget=... lower" in text

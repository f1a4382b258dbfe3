"""A slice of benchmarks/capped_training.py: the operating system refuses memory, for real."""

from __future__ import annotations

import sys

import pytest

from benchmarks.capped_training import arguments_of, compare, run_child
from rematic.memory import glibc

SMALL = ["--steps", "8", "--layers", "2", "--max-length", "512", "--cap", "32MiB"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or glibc.read_heap() is None,
    reason="the cap needs Linux with glibc 2.33",
)
@pytest.mark.timeout(300)
def test_a_training_whose_allocations_fail_ends_with_the_bits_of_the_plain_one() -> None:
    options = arguments_of(SMALL)
    rows = run_child(["plain", "kept", "op"], options)
    found = compare(rows | run_child(["planned"], options))
    assert "can't allocate memory" in found["kept"]["out_of_memory"]
    for way in ("op", "planned"):  # whoever plans recovers what one that is blind recovers
        row = found[way]
        assert row["bit_equal"], row
        assert row["steps"] == 8
    answers = ("op_retries", "unit_retries", "step_retries", "evictions")
    assert sum(found["op"][answer] for answer in answers) > 0, found["op"]


def test_a_way_that_ends_early_or_with_other_bits_does_not_count_as_equal() -> None:
    plain = {"digest": "a", "losses": ["0x1p+0"]}
    found = compare(
        {
            "plain": plain,
            "kept": {"out_of_memory": "refused"},
            "op": {**plain, "digest": "b"},
            "unit": {**plain, "losses": ["0x1p+1"]},
            "planned": dict(plain),
        }
    )
    equal = {way: row["bit_equal"] for way, row in found.items()}
    assert equal == {"kept": False, "op": False, "unit": False, "planned": True}
    assert not found["kept"]["finished"]

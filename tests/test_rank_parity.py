"""A slice of benchmarks/rank_parity.py (E1, B2): ranks evict alone and switch together."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rank_parity import WRAPPERS, Kind, all_kinds, judge, run

KINDS = (
    Kind(wrapper="ddp", num_ranks=2, num_steps=21),
    Kind(wrapper="ddp-bf16", num_ranks=2, accumulate=4, num_steps=21),
    Kind(wrapper="fsdp1", num_ranks=2, num_steps=21),
    Kind(wrapper="fsdp2", num_ranks=2, accumulate=4, num_steps=21),
    Kind(wrapper="fsdp2-bf16", num_ranks=2, num_steps=21),
    Kind(wrapper="fsdp2-cpu-offload", num_ranks=2, num_steps=21),
    Kind(wrapper="ddp", num_ranks=4, accumulate=2, num_steps=21),
    Kind(wrapper="hsdp", num_ranks=4, num_steps=21),
)


@pytest.fixture(scope="module")
def verdicts() -> dict[Kind, str]:
    return {kind: verdict for kind, verdict, _ in run(list(KINDS))}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k.wrapper}-{k.num_ranks}x{k.accumulate}")
def test_ranks_have_the_bits_of_the_plain_run(kind: Kind, verdicts: dict[Kind, str]) -> None:
    """And the same weights, collectives and steps in which policies change."""
    assert verdicts[kind] == "same"


def test_every_wrapper_is_run() -> None:
    assert {kind.wrapper for kind in KINDS} == set(WRAPPERS)
    assert {(k.num_ranks, k.accumulate) for k in all_kinds(9)} == {(2, 1), (2, 4), (4, 1), (4, 4)}


GOOD: dict[str, Any] = {
    "different": [],
    "same_collectives": True,
    "whole": "a",
    "policies": ["keep", "recompute", "selective"],
    "evictions": 0,
}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "same"),
        ({"different": ["blocks.0.up.weight"]}, "different bits: blocks.0.up.weight"),
        ({"same_collectives": False}, "different collectives"),
        ({"whole": "b"}, "ranks have drifted apart"),
        ({"policies": ["keep", "keep", "selective"]}, "policies changed at different steps"),
        ({"evictions": 0}, "not one rank alone has evicted"),
        ({"error": "RuntimeError: no"}, "error: RuntimeError: no"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_seen(change: dict[str, Any], verdict: str) -> None:
    other = {**GOOD, "evictions": 3, **change}
    assert judge(KINDS[0], [GOOD, other]) == verdict
    assert judge(KINDS[0], [GOOD]) == "a rank hangs or died"

"""A plan for a step that is about to run, in bytes above what is in use."""

from __future__ import annotations

import pytest

from rematic.planner import (
    FixedBytes,
    OpCost,
    Option,
    Pace,
    Problem,
    StepCosts,
    Surroundings,
    length_of_bucket,
    propose,
    rise_of,
)
from rematic.policy import Action, Keep, Recompute, Selective

AROUND = Surroundings(embedding_forward=3, embedding_kept=2, head=20, head_left=4)
PACE = Pace(
    op_seconds=lambda op: 1.0,
    replay_seconds=0.0,
    selective_seconds=0.0,
    moved_bytes_per_second=1.0,
)


def _option(action: Action, kept: int, seconds: float) -> Option:
    return Option(
        action=action,
        kept_bytes=kept,
        forward_bytes=kept,
        backward_bytes=10,
        gradient_bytes=1,
        seconds=seconds,
    )


OPTIONS = (
    _option(Keep(), 10, 0.0),
    _option(Selective(save=("aten::mm[0]", "aten::_flash_attention_forward[1]")), 4, 1.0),
    _option(Recompute(), 1, 2.0),
)
PROBLEM = Problem(fixed=FixedBytes(weights=1000), around=AROUND, units=(OPTIONS,) * 3)
COSTS = StepCosts(
    batch=1,
    length=8,
    padded=False,
    fixed=PROBLEM.fixed,
    around=AROUND,
    around_ops=(OpCost(name="aten::mm", occurrence=0, result_bytes=1, flops=1, touched_bytes=1),),
    classes=(),
    unit_classes=(),
    unit_names=(),
)


def test_bytes_are_counted_from_what_is_in_use() -> None:
    proposal = propose(COSTS, PROBLEM, PACE, room_bytes=100)
    assert proposal.plan.counts() == {"keep": 3}
    assert proposal.peak_bytes == 2 + 30 + 20
    assert (proposal.fits, proposal.extra_seconds, proposal.seconds) == (True, 0.0, 3.0)
    # the head comes 20 above the last unit's end, and so much more as the units between them keep
    assert proposal.rise_after_bytes == (40, 30, 20)


def test_less_room_gives_a_slower_plan_and_attention_goes_by_its_group() -> None:
    proposal = propose(COSTS, PROBLEM, PACE, room_bytes=37)
    assert proposal.fits
    assert proposal.peak_bytes <= 37
    saved = [a.save for a in proposal.plan.actions if isinstance(a, Selective)]
    assert saved == [("aten::mm[0]", "attention[1]")] * len(saved) != []


@pytest.mark.parametrize("room_bytes", [-5, 0, 24])
def test_too_little_room_is_said(room_bytes: int) -> None:
    proposal = propose(COSTS, PROBLEM, PACE, room_bytes=room_bytes)
    assert not proposal.fits
    assert proposal.peak_bytes == 2 + 3 + 20


def test_the_rise_of_a_plan_that_is_given() -> None:
    given = Problem(fixed=PROBLEM.fixed, around=AROUND, units=((OPTIONS[2],),) * 3)
    assert rise_of(given) == 2 + 3 + 20


def test_buckets_round_up_by_less_than_a_64th_of_a_fold() -> None:
    seen = [length_of_bucket(length) for length in range(1, 5000)]
    assert seen == sorted(seen)
    for length, longest in enumerate(seen, start=1):
        assert length <= longest <= 1.0158 * length
        assert length_of_bucket(longest) == longest
    assert len({n for n in seen if n > 1000}) == pytest.approx(64 * 1.609, abs=2)

from dataclasses import replace

import pytest

from rematic.planner import peak_of, problem_of
from rematic.planner.schedules import every_kth, every_unit, in_segments, sqrt_segments
from tests.planner.blocks import PACE, step_costs


def problem(num_units):
    return problem_of(step_costs(num_units), PACE, allowed=("keep", "recompute"))


def test_every_unit_and_every_kth():
    assert every_unit(problem(3), "recompute") == (1, 1, 1)
    assert every_kth(problem(5), "recompute", rest="keep", k=2) == (1, 0, 1, 0, 1)
    with pytest.raises(ValueError, match="unit 0 has no option 'offload': expected one of keep, r"):
        every_unit(problem(3), "offload")
    with pytest.raises(ValueError, match="k is 0: expected a distance of 1 or more"):
        every_kth(problem(3), "recompute", rest="keep", k=0)


@pytest.mark.parametrize(
    ("num_units", "lengths"),
    [
        (0, ()),
        (1, (1,)),
        (4, (2, 2)),
        (10, (3, 3, 2, 2)),
        (16, (4, 4, 4, 4)),
        (32, (6, 6, 5, 5, 5, 5)),
    ],
)
def test_there_are_about_sqrt_n_segments(num_units, lengths):
    assert sqrt_segments(num_units) == lengths
    assert sum(lengths) == num_units


def test_segments_of_one_unit_are_plain_recomputation():
    plain = problem(4)
    segments = in_segments(plain, (1, 1, 1, 1))
    assert peak_of(segments, (0,) * 4) == peak_of(plain, every_unit(plain, "recompute"))
    assert segments.units[0][0].seconds == plain.units[0][1].seconds


def test_a_segment_keeps_its_output_and_is_kept_whole_in_backward():
    plain = problem(9)
    segments = in_segments(plain, sqrt_segments(9))
    assert len(segments.units) == 3
    (option,) = segments.units[0]
    assert option.kept_bytes == 40
    # Two units kept by the replay, the last one as under recompute, less the output at its start.
    assert option.backward_bytes == 2 * 280 + 40 + 390 - 40
    assert option.gradient_bytes == 180
    assert option.forward_bytes == 240  # a forward beside the output of the unit before
    assert option.seconds == pytest.approx(3 * 17.4)
    # 1000 at rest, the first segment goes backward last, beside the gradients of the others.
    peak = peak_of(segments, (0, 0, 0))
    assert (peak.total, peak.unit) == (1000 + 40 + 2 * 180 + option.backward_bytes, 0)


def test_segments_must_cover_the_units():
    with pytest.raises(ValueError, match=r"the segments \[2, 1\] do not cover the 4 units"):
        in_segments(problem(4), (2, 1))
    with pytest.raises(ValueError, match="do not cover the 4 units: expected lengths above 0"):
        in_segments(problem(4), (4, 0))
    no_keep = replace(problem(2), units=(problem(2).units[0][1:],) * 2)
    with pytest.raises(ValueError, match="unit 0 has no option 'keep'"):
        in_segments(no_keep, (2,))

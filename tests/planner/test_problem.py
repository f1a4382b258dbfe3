from dataclasses import replace

import pytest

from rematic.planner import (
    FixedBytes,
    Option,
    Peak,
    Problem,
    Surroundings,
    intervals_of,
    moved_bytes_of,
    peak_of,
    seconds_of,
)
from rematic.policy import Keep, Offload, Recompute

KEEP = Option(
    action=Keep(),
    kept_bytes=100,
    forward_bytes=110,
    backward_bytes=5,
    gradient_bytes=7,
    seconds=0.0,
)
RECOMPUTE = Option(
    action=Recompute(),
    kept_bytes=10,
    forward_bytes=40,
    backward_bytes=125,
    gradient_bytes=7,
    seconds=1.5,
)
OFFLOAD = Option(
    action=Offload(),
    kept_bytes=0,
    forward_bytes=110,
    backward_bytes=130,
    gradient_bytes=7,
    seconds=4.0,
    moved_bytes=90,
)


def problem(num_units=3, **around):
    return Problem(
        fixed=FixedBytes(weights=500, gradients=0, optimizer=300, other=200),
        around=Surroundings(**around),
        units=((KEEP, RECOMPUTE, OFFLOAD),) * num_units,
    )


def test_the_peak_of_kept_units_lies_in_the_last_forward():
    # 1000 fixed, two kept units, and the third one's forward
    assert peak_of(problem(), [0, 0, 0]) == Peak(
        total=1310, place="unit forward", unit=2, fixed=1000, kept=200, gradients=0, working=110
    )


def test_a_backward_stands_on_its_own_kept_bytes_and_later_gradients():
    # recomputed: 10 + 10 kept, its own replay rises by 125, a later unit left 7
    peak = peak_of(problem(), [1, 1, 0])
    assert (peak.total, peak.place, peak.unit) == (1152, "unit backward", 1)
    assert (peak.kept, peak.gradients, peak.working) == (20, 7, 125)


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ({"embedding_forward": 900}, (1900, "embedding forward")),
        ({"embedding_kept": 5, "head": 900}, (2205, "head")),
        ({"embedding_backward": 900, "head_left": 3}, (1924, "embedding backward")),
        (
            {"embedding_kept": 5, "embedding_gradient": -4, "optimizer": 900},
            (1917, "optimizer"),
        ),
    ],
    ids=["embedding forward", "head", "embedding backward", "optimizer"],
)
def test_the_peak_may_lie_outside_the_units(around, expected):
    peak = peak_of(problem(**around), [0, 0, 0])
    assert (peak.total, peak.place) == expected
    assert peak.unit is None
    assert peak.fixed + peak.kept + peak.gradients + peak.working == peak.total


def test_inputs_that_callers_hold_are_there_until_the_last_unit_has_run():
    moved = replace(RECOMPUTE, late_bytes=8)
    one = replace(problem(), units=((moved,), (KEEP,), (KEEP,)))
    highest = [i.total - 1000 for i in intervals_of(one, [0, 0, 0])]
    # forward of units 1 and 2 eight bytes higher, their backward not
    assert highest == [0, 40, 128, 228, 210, 215, 122, 149, 21, 21]


def test_seconds_and_moved_bytes_add_up():
    assert seconds_of(problem(), [0, 1, 2]) == 5.5
    assert moved_bytes_of(problem(), [2, 1, 2]) == 180


def test_a_model_without_units_has_a_peak_too():
    assert peak_of(problem(0, head=40), []).total == 1040


def test_an_assignment_must_name_an_option_for_each_unit():
    with pytest.raises(ValueError, match="speaks of 2 units but the problem has 3"):
        peak_of(problem(), [0, 0])
    with pytest.raises(ValueError, match="unit 1 has no option 3: expected a position from 0 to 2"):
        seconds_of(problem(), [0, 3, 0])
    with pytest.raises(ValueError, match="unit 0 has no option -1"):
        peak_of(problem(), [-1, 0, 0])


def test_a_cost_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"forward_bytes -1: expected a number from 0 on"):
        Option(
            action=Keep(),
            kept_bytes=0,
            forward_bytes=-1,
            backward_bytes=0,
            gradient_bytes=0,
            seconds=0.0,
        )


def test_a_unit_without_options_is_refused():
    with pytest.raises(ValueError, match="unit 1 has no option: expected at least one"):
        Problem(fixed=FixedBytes(), around=Surroundings(), units=((KEEP,), ()))

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.planner.op_sets import (
    OpSet,
    TimedSet,
    best_op_sets,
    choose_sets,
    corner_sets,
    keepable_ops,
)
from tests.planner.blocks import OPS, op

properties = settings(max_examples=50, derandomize=True, database=None)


def test_views_random_ops_and_what_is_changed_in_place_are_never_kept():
    # Left are the first mm and gelu: the second mm is changed by add_, dropout draws, and the
    # replay stops before the last add.
    assert keepable_ops(OPS) == (0, 2)


@properties
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), st.booleans()),
        max_size=7,
    )
)
def test_the_sets_are_all_undominated_sums(items):
    ops = [
        op("aten::mm", i, made=made, freed=None if out else 9)
        for i, (made, _, out) in enumerate(items)
    ]
    seconds = [one for _, one, _ in items]
    sums = set()
    for n in range(len(items) + 1):
        for chosen in itertools.combinations(range(len(items)), n):
            usable = [i for i in chosen if items[i][0] > 0]
            kept = sum(0 if items[i][2] else items[i][0] for i in usable)
            sums.add((kept, sum(seconds[i] for i in usable)))
    best = {
        (kept, saved)
        for kept, saved in sums
        if not any((k <= kept and s >= saved) and (k, s) != (kept, saved) for k, s in sums)
    }
    found = best_op_sets(ops, seconds)
    assert {(one.kept_bytes, one.saved_seconds) for one in found} == best
    assert len(found) == len(best)
    assert [one.kept_bytes for one in found] == sorted((k for k, _ in best), reverse=True)


def test_an_output_that_lives_on_anyway_is_kept_for_nothing():
    sets = best_op_sets([op("aten::mm", made=100), op("aten::mm", 1, made=10, freed=1)], [2.0, 1.0])
    assert sets == (
        OpSet(ops=(0, 1), kept_bytes=10, saved_seconds=3.0),
        OpSet(ops=(0,), kept_bytes=0, saved_seconds=2.0),
    )


def test_corners_take_ops_by_seconds_per_byte():
    ops = [op("aten::mm", i, made=made, freed=9) for i, made in enumerate((100, 10, 50, 40))]
    ops.append(op("aten::mm", 4, made=30))  # the output: kept for nothing
    corners = corner_sets(ops, [5.0, 3.0, 0.5, 4.0, 1.0])
    assert [(one.kept_bytes, one.saved_seconds) for one in corners] == [
        (200, 13.5),
        (150, 13.0),
        (50, 8.0),
        (10, 4.0),
        (0, 1.0),
    ]
    assert corners[2].ops == (1, 3, 4)
    assert corner_sets(ops, [5.0, 3.0, 0.5, 4.0, 1.0], below_bytes=150) == corners[2:]


@properties
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.5, 1.0, 2.0, 3.5])), max_size=7),
)
def test_no_sum_lies_above_the_line_between_corners(items):
    ops = [op("aten::mm", i, made=made, freed=9) for i, (made, _) in enumerate(items)]
    seconds = [one for _, one in items]
    corners = corner_sets(ops, seconds)
    assert corners[-1].ops == ()
    for one in best_op_sets(ops, seconds):
        above = min(c for c in (x.kept_bytes for x in corners) if c >= one.kept_bytes)
        below = max(c for c in (x.kept_bytes for x in corners) if c <= one.kept_bytes)
        saved = {x.kept_bytes: x.saved_seconds for x in corners}
        share = (one.kept_bytes - below) / (above - below) if above > below else 0.0
        assert one.saved_seconds <= saved[below] + share * (saved[above] - saved[below]) + 1e-9


def timed(*pairs):
    return [
        TimedSet(op_set=OpSet(ops=(i,), kept_bytes=kept, saved_seconds=0.0), seconds=seconds)
        for i, (kept, seconds) in enumerate(pairs)
    ]


def kept_of(sets):
    return [one.kept_bytes for one in sets]


def test_of_many_sets_those_that_lie_lowest_are_chosen():
    candidates = timed((100, 0.5), (80, 0.6), (50, 1.0), (40, 1.5), (10, 6.0), (0, 10.0))
    ends = [(0, 10.5), (120, 0.0)]
    # Under the line from 10.5 to 0 the set of 40 bytes lies 5.5 deep, then, under the lines beside
    # it, that of 10 bytes 2.25, that of 80 bytes 0.15.
    assert kept_of(choose_sets(candidates, ends=ends, limit=1)) == [40]
    assert kept_of(choose_sets(candidates, ends=ends, limit=2)) == [40, 10]
    assert kept_of(choose_sets(candidates, ends=ends, limit=9)) == [100, 80, 50, 40, 10, 0]


def test_a_set_that_keeps_more_for_as_much_time_is_left_out():
    candidates = timed((100, 1.0), (60, 1.0), (50, 3.0))
    assert kept_of(choose_sets(candidates, ends=[(0, 10.0), (120, 0.0)], limit=9)) == [60, 50]


def test_where_there_is_room_sets_above_the_line_are_chosen_too():
    candidates = timed(*((10 * i, 10.0 - i + 0.2) for i in range(1, 9)))
    ends = [(0, 10.0), (100, 0.0)]
    assert kept_of(choose_sets(candidates, ends=ends, limit=2)) == [70, 30]
    assert choose_sets([], ends=ends, limit=2) == ()


def test_thousands_of_sums_are_thinned_out_in_no_time():
    ops = [op("aten::mm", i, made=3**i, freed=99) for i in range(16)]
    sets = best_op_sets(ops, [2.0**i for i in range(16)])
    assert sets[0].ops == tuple(range(16))
    assert sets[-1].ops == ()

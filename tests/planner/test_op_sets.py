import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.planner.op_sets import OpSet, best_op_sets, choose_sets, hull, keepable_ops
from tests.planner.blocks import OPS, op


def test_views_random_ops_and_what_is_changed_in_place_are_never_kept():
    # Left are the first mm and gelu: the second mm is changed by add_, dropout draws, and the
    # replay stops before the last add.
    assert keepable_ops(OPS) == (0, 2)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
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


def sets_of(*pairs):
    return tuple(
        OpSet(ops=(i,), kept_bytes=kept, saved_seconds=saved)
        for i, (kept, saved) in enumerate(pairs)
    )


def test_the_hull_is_what_mixes_of_two_do_not_beat():
    sets = sets_of((100, 10.0), (80, 9.5), (60, 6.0), (50, 6.5), (10, 3.0), (0, 0.0))
    assert [one.kept_bytes for one in hull(sets)] == [100, 80, 10, 0]


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_of_many_sets_the_hull_is_chosen_first(limit):
    sets = sets_of((100, 10.0), (90, 9.7), (80, 9.5), (50, 5.0), (40, 4.6), (10, 3.0), (0, 0.0))
    chosen = choose_sets(sets, limit=limit)
    assert len(chosen) == limit
    assert chosen[0] == sets[0]
    assert chosen[-1] == sets[-1]
    corners = hull(sets)
    assert set(corners) <= set(chosen) or len(corners) > limit
    assert choose_sets(sets, limit=7) == sets


def test_thousands_of_sums_are_thinned_out_in_no_time():
    ops = [op("aten::mm", i, made=3**i, freed=99) for i in range(16)]
    sets = best_op_sets(ops, [2.0**i for i in range(16)])
    assert sets[0].ops == tuple(range(16))
    assert sets[-1].ops == ()

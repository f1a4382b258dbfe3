from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.planner import options_of, problem_of
from rematic.planner.frontier import listed_option, selective_option
from rematic.planner.op_sets import OpSet
from rematic.policy import Compress, Keep, Offload, Recompute, Selective
from tests.planner.blocks import BLOCK, PACE, op, step_costs


def by_name(options):
    return {option.action.name: option for option in options}


def test_measured_actions_take_their_bytes_over_and_get_seconds():
    options = by_name(options_of(BLOCK, PACE, allowed=("keep", "recompute", "offload")))
    assert options["keep"].seconds == 0.0
    # All ops but the last run again: 800 + 50 + 800 + 20 + 20 flops at 100 a second, half a second.
    assert options["recompute"].seconds == pytest.approx(17.4)
    assert options["offload"].seconds == 48.0  # 240 bytes away and back at 10 a second
    keep = options["keep"]
    assert (keep.kept_bytes, keep.forward_bytes, keep.backward_bytes) == (280, 300, 150)
    assert options["offload"].moved_bytes == 240
    assert {option.gradient_bytes for option in options.values()} == {60}


def test_op_sets_become_selective_options_that_name_their_occurrences():
    options = options_of(BLOCK, PACE, allowed=("selective",))
    assert [option.action for option in options] == [
        Selective(save=("aten::mm[0]", "aten::gelu[0]")),
        Selective(save=("aten::mm[0]",)),
    ]
    both, first = options
    assert (both.kept_bytes, first.kept_bytes) == (240, 140)
    assert both.seconds == pytest.approx(16.9 - 8.5 + 1.0)
    # Backward comes to the same bytes: what is kept the replay need not make.
    assert both.kept_bytes + both.backward_bytes == first.kept_bytes + first.backward_bytes == 430


def test_a_kept_result_raises_the_forward_where_it_outlives_its_use():
    first = selective_option(BLOCK, OpSet(ops=(0,), kept_bytes=100, saved_seconds=8.0), seconds=1.0)
    # Plain: mm and gelu, 200 together. With mm kept it is still there beside gelu and the next mm.
    assert first.forward_bytes == 200 + 40


def test_a_list_of_which_a_unit_has_no_op_is_the_list_all_the_same():
    option = listed_option(BLOCK, PACE, save=("convolution",))
    recompute = by_name(options_of(BLOCK, PACE, allowed=("recompute",)))["recompute"]
    assert option.action == Selective(save=("convolution",))
    assert option.kept_bytes == recompute.kept_bytes


def test_options_are_ordered_by_what_they_keep():
    options = options_of(BLOCK, PACE)
    assert [option.kept_bytes for option in options] == [280, 240, 140, 40, 40]
    assert isinstance(options[0].action, Keep)
    assert [type(option.action) for option in options[3:]] == [Recompute, Offload]


def test_lossy_actions_are_taken_only_if_they_are_allowed():
    assert Compress() not in [option.action for option in options_of(BLOCK, PACE)]
    allowed = options_of(BLOCK, PACE, allowed=("keep", "compress"))
    assert [option.action for option in allowed] == [Keep(), Compress()]


def test_a_class_without_options_is_refused():
    bare = replace(BLOCK, actions=BLOCK.actions[2:])
    with pytest.raises(ValueError, match="the class Block has none of the actions keep: expected"):
        options_of(bare, PACE, allowed=("keep",))


def test_units_of_one_class_share_their_options():
    problem = problem_of(step_costs(), PACE)
    assert len(problem.units) == 3
    assert problem.units[0] is problem.units[2]
    assert problem.fixed.weights == 1000
    assert problem.around.head == 50


@settings(max_examples=40, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 500), st.booleans()), max_size=8),
    st.booleans(),
)
def test_a_heavier_action_never_keeps_more(items, beside):
    ops = tuple(
        op("aten::mm", i, made=made, flops=flops, freed=None if out else len(items) - 1)
        for i, (made, flops, out) in enumerate(items)
    )
    pace = replace(PACE, overlaps_host=beside)
    options = options_of(replace(BLOCK, ops=ops), pace, allowed=("keep", "selective", "recompute"))
    names = [option.action.name for option in options]
    kept = [option.kept_bytes for option in options]
    assert names[0] == "keep"
    assert "recompute" in names
    assert kept == sorted(kept, reverse=True)
    assert min(kept) == 40  # what recompute keeps; sets that cost nothing keep as much
    assert all(option.seconds >= 0 for option in options)

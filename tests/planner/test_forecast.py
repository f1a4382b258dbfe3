from dataclasses import replace

import pytest

from rematic.planner import (
    POLICIES,
    FixedBytes,
    Surroundings,
    Terms,
    advice_of,
    forecast_step,
    longest_length,
    where_of,
)
from rematic.planner.forecast import forward_seconds
from rematic.policy import Offload, Selective, Tile
from tests.planner.blocks import BLOCK, OPS, PACE, step_costs


def by_policy(costs, budget_bytes):
    forecast = forecast_step(costs, PACE, Terms(budget_bytes=budget_bytes))
    return forecast, {one.policy: one for one in forecast.policies}


def test_every_policy_has_its_peak_and_its_time():
    forecast, policies = by_policy(step_costs(4), 1700)
    assert list(policies) == list(POLICIES)
    keep, recompute = policies["keep all"], policies["recompute all"]
    # 1000 at rest, four units kept, the head on top; the backward of the last one is higher.
    assert keep.peak.total == 1000 + 4 * 280 + 150
    assert (keep.slow_down, keep.fits) == (0.0, False)
    # A forward is 17.1 seconds a unit, and backward is twice that.
    assert keep.seconds == pytest.approx(3 * 4 * 17.1)
    assert recompute.peak.total == 1000 + 40 + 390 + 3 * 60
    assert recompute.seconds == pytest.approx(keep.seconds + 4 * 17.4)
    assert recompute.slow_down == pytest.approx(4 * 17.4 / keep.seconds)
    assert policies["every second block"].plan == {"recompute": 2, "keep": 2}
    assert policies["sqrt(N) segments"].plan == {"recompute": 2}
    assert policies["op list"].plan == {"selective": 4}
    assert recompute.fits
    planned = forecast.planned
    assert planned.fits
    fitting = [one.seconds for one in policies.values() if one.fits]
    assert planned.seconds == min(fitting)


def test_the_op_list_is_what_selective_keeps_by_default():
    _, policies = by_policy(step_costs(1), 10**6)
    # The first mm stays, the second is changed in place; the rest runs again.
    assert policies["op list"].peak.kept == 140
    assert policies["op list"].seconds - policies["keep all"].seconds == pytest.approx(16.9 - 7.0)


def test_the_intervals_of_a_step_are_there_to_be_drawn():
    forecast, policies = by_policy(step_costs(4), 1600)
    places = [interval.place for interval in forecast.planned.intervals]
    assert places[0] == "embedding forward"
    assert places[-2:] == ["embedding backward", "optimizer"]
    assert places.count("unit backward") == 4
    assert max(i.total for i in policies["keep all"].intervals) == policies["keep all"].peak.total


def scaled(length):
    """Costs at ten tokens, scaled to a length."""

    def at(num_bytes):
        return num_bytes * length // 10

    actions = tuple(
        (name, replace(one, kept=at(one.kept), forward=at(one.forward), backward=at(one.backward)))
        for name, one in BLOCK.actions
    )
    ops = tuple(replace(op, result_bytes=at(op.result_bytes)) for op in OPS)
    unit = replace(BLOCK, actions=actions, ops=ops)
    return replace(step_costs(4), length=length, classes=(unit,))


def test_the_longest_sequence_is_the_last_that_fits():
    for policy in POLICIES:
        found = longest_length(
            scaled, PACE, Terms(budget_bytes=2000), policy=policy, max_length=100
        )
        assert 0 < found < 100
        peaks = [
            by_policy(scaled(length), 2000)[1][policy].peak.total for length in (found, found + 1)
        ]
        assert peaks[0] <= 2000 < peaks[1]


def test_nothing_or_everything_may_fit():
    args = {"policy": "planned", "max_length": 50}
    assert longest_length(scaled, PACE, Terms(budget_bytes=900), **args) == 0
    assert longest_length(scaled, PACE, Terms(budget_bytes=10**9), **args) == 50
    with pytest.raises(ValueError, match="unknown policy 'best': expected one of keep all, reco"):
        longest_length(scaled, PACE, Terms(budget_bytes=1), policy="best", max_length=5)


def test_a_peak_in_head_and_loss_calls_for_a_tiled_loss():
    costs = replace(step_costs(4), around=Surroundings(head=5000))
    forecast, policies = by_policy(costs, 1600)
    assert where_of(forecast.planned.peak) == "head and loss"
    # Recomputing more blocks would not help, and the planner does the least of evils.
    (line,) = advice_of(forecast)
    assert "recomputing more blocks does not lower it. A tiled loss" in line
    assert forecast.without_head_bytes < policies["keep all"].peak.total < 1000 + 4 * 280 + 5001


def test_a_budget_below_what_is_fixed_calls_for_other_weights():
    (line,) = advice_of(by_policy(step_costs(4), 999)[0])
    assert "weights, gradients that stay and optimizer state alone are 1000 B" in line


def test_a_peak_in_the_optimizer_calls_for_a_fused_one():
    costs = replace(step_costs(2), around=Surroundings(optimizer=5000))
    forecast, _ = by_policy(costs, 1600)
    assert where_of(forecast.planned.peak) == "optimizer"
    assert advice_of(forecast) == (
        "the peak lies in the step of the optimizer, which needs 4.9 KiB for itself: a fused one "
        "(`fused=True`) needs nothing.",
    )


def test_a_block_that_is_too_large_alone_calls_for_tiles():
    costs = replace(step_costs(2), fixed=FixedBytes(weights=100))
    forecast, _ = by_policy(costs, 300)
    assert where_of(forecast.planned.peak) == "unit backward 0"
    (line,) = advice_of(forecast)
    assert line.startswith("one block at work needs 390 B: run its token-wise part in slices")


def test_a_plan_that_fits_needs_no_advice():
    assert advice_of(by_policy(step_costs(4), 1600)[0]) == ()


def test_where_the_host_works_beside_the_device_a_unit_takes_no_less_than_the_host():
    beside = replace(PACE, overlaps_host=True, replay_seconds=100.0)
    assert forward_seconds(step_costs(4), PACE) == pytest.approx(4 * 17.1)
    assert forward_seconds(step_costs(4), beside) == 400.0


def test_only_the_planner_keeps_to_given_actions():
    given = (None, Offload(), Selective(save=("aten::gelu",)), None)
    terms = Terms(budget_bytes=10**6, given=given)
    forecast = forecast_step(step_costs(4), PACE, terms)
    assert forecast.planned.plan == {"keep": 2, "offload": 1, "selective": 1}
    assert forecast.policies[0].plan == {"keep": 4}
    tile = Terms(budget_bytes=10**6, given=(Tile(tile_tokens=4), None, None, None))
    with pytest.raises(ValueError, match="the action tile was not measured for Block: expected"):
        forecast_step(step_costs(4), PACE, tile)

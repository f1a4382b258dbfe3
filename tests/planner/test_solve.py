from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_problems import budgets, kept_seconds, stack
from rematic.planner import (
    FixedBytes,
    Problem,
    Surroundings,
    best_of_all,
    peak_of,
    seconds_of,
    solve,
)
from rematic.policy import Keep, Offload, Recompute, RecomputeOffload
from tests.planner.problems import option, small_problems, under_autocast

# A fixed seed: what the suite finds today it finds tomorrow.
properties = settings(max_examples=60, derandomize=True, database=None)


@properties
@given(small_problems(), st.floats(0, 1.2))
def test_a_plan_fits_exactly_if_one_does_and_is_hardly_slower_than_the_best(problem, share):
    budget = int(share * peak_of(problem, [0] * len(problem.units)).total)
    best = best_of_all(problem, budget_bytes=budget)
    solution = solve(problem, budget_bytes=budget)
    assert solution.fits == (best is not None)
    assert solution.peak == peak_of(problem, solution.assignment)
    if best is None:
        assert solution.peak.total > budget
        return
    assert solution.peak.total <= budget
    # Bytes this small are counted one by one, so here the plan is the best.
    assert solution.seconds == pytest.approx(seconds_of(problem, best))


@properties
@given(small_problems())
def test_the_lowest_peak_is_the_smallest_budget_that_is_enough(problem):
    lowest = solve(problem, budget_bytes=0).peak.total
    assert solve(problem, budget_bytes=lowest).fits
    if lowest:
        assert not solve(problem, budget_bytes=lowest - 1).fits
        assert best_of_all(problem, budget_bytes=lowest - 1) is None
    assert best_of_all(problem, budget_bytes=lowest) is not None


@pytest.mark.parametrize(
    "problems",
    [
        small_problems(same_gradients=False),
        small_problems(late=True),
        small_problems(autocast=True),
    ],
    ids=["gradients", "late", "autocast"],
)
def test_what_differs_between_options_beside_their_own_bytes_is_counted_on_the_safe_side(problems):
    @properties
    @given(problems, st.floats(0, 1.2))
    def check(problem, share):
        budget = int(share * peak_of(problem, [0] * len(problem.units)).total)
        solution = solve(problem, budget_bytes=budget)
        assert solution.fits == (solution.peak.total <= budget)

    check()


def test_what_the_head_needs_after_autocast_is_left_bounds_a_plan():
    keep = option(100, 130, 10)
    recompute = option(20, 60, 90, seconds=1.0, cast=30, action=Recompute())
    around = Surroundings(head=70, casts=60, head_uncast=150)
    problem = Problem(fixed=FixedBytes(), around=around, units=((keep, recompute),) * 2)
    for budget in range(180, 380, 10):
        best = best_of_all(problem, budget_bytes=budget)
        solution = solve(problem, budget_bytes=budget)
        assert solution.fits == (best is not None) == (solution.peak.total <= budget)
        if best is not None:
            assert solution.seconds == seconds_of(problem, best)


@settings(max_examples=15, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_more_budget_never_gives_a_slower_plan(seed, num_units, shares):
    problem = stack(num_units, seed=seed)
    low, high = budgets(problem, 2)
    times = [
        solve(problem, budget_bytes=int(low + share * (high - low))).seconds
        for share in sorted(shares)
    ]
    assert times == sorted(times, reverse=True)


@properties
@given(small_problems(), st.lists(st.integers(0, 8000), min_size=2, max_size=6))
def test_more_budget_never_gives_a_slower_plan_of_a_small_problem(problem, sizes):
    solutions = [solve(problem, budget_bytes=size) for size in sorted(sizes)]
    times = [solution.seconds for solution in solutions if solution.fits]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("num_units", [3, 5])
def test_a_stack_is_within_one_per_cent_of_brute_force(num_units):
    problem = stack(num_units, seed=5)
    for budget in budgets(problem, 5):
        best = best_of_all(problem, budget_bytes=budget)
        solution = solve(problem, budget_bytes=budget)
        assert solution.peak.total <= budget
        assert solution.seconds <= 1.01 * seconds_of(problem, best) + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_equal_units_under_autocast_are_within_one_per_cent_of_brute_force(seed):
    problem = under_autocast(stack(6, seed=seed, num_actions=4, classes=1))
    whole = kept_seconds(problem)
    times = []
    for budget in budgets(problem, 8):
        best = best_of_all(problem, budget_bytes=budget)
        solution = solve(problem, budget_bytes=budget)
        assert solution.peak.total <= budget
        assert whole + solution.seconds <= 1.01 * (whole + seconds_of(problem, best))
        times.append(solution.seconds)
    assert times == sorted(times, reverse=True)


def test_the_same_problem_always_gets_the_same_plan():
    budget = budgets(stack(20, seed=3), 5)[2]
    solutions = {solve(stack(20, seed=3), budget_bytes=budget) for _ in range(3)}
    assert len(solutions) == 1


@pytest.mark.parametrize("power", [50, 59, 60, 61, 62, 63, 64, 80])
def test_no_number_of_bytes_is_too_large(power):
    unit = 2**power
    options = (
        option(10 * unit, 11 * unit, unit),
        option(4 * unit + 7, 5 * unit, 10 * unit, seconds=0.4, action=Recompute()),
        option(unit, 5 * unit, 10 * unit, seconds=1.0, action=RecomputeOffload()),
    )
    problem = Problem(fixed=FixedBytes(), around=Surroundings(head=unit), units=(options,) * 6)
    best = [best_of_all(problem, budget_bytes=share * unit) for share in range(10, 70, 5)]
    found = [solve(problem, budget_bytes=share * unit) for share in range(10, 70, 5)]
    assert [one.fits for one in found] == [one is not None for one in best]
    times = [one.seconds for one in found if one.fits]
    assert times == sorted(times, reverse=True)
    optimal = [seconds_of(problem, one) for one in best if one is not None]
    assert times == pytest.approx(optimal, abs=1.01)  # one unit more at most


@pytest.mark.parametrize("num_units", [1, 200])
def test_few_and_many_units_are_planned_alike(num_units):
    keep, recompute = option(100, 100), option(10, 50, 90, seconds=1.0, action=Recompute())
    problem = replace(stack(2), units=((keep, recompute),) * num_units)
    around = problem.around
    base = problem.fixed.total + around.embedding_kept + around.head + 10 * num_units
    for num_kept in (0, num_units // 3, num_units):
        solution = solve(problem, budget_bytes=base + 90 * num_kept)
        assert (solution.fits, solution.seconds) == (True, num_units - num_kept)


def test_options_that_are_equal_in_everything_are_one():
    same = tuple(option(100, 100, 10, seconds=1.0) for _ in range(6))
    problem = replace(stack(2), units=(same,) * 5)
    solution = solve(problem, budget_bytes=10**15)
    assert (solution.assignment, solution.seconds) == ((0,) * 5, 5.0)


def test_equal_units_are_kept_from_the_last_one_on():
    keep = option(100, 100, 0, 0, 0.0)
    recompute = option(10, 50, 90, 0, 1.0, action=Recompute())
    problem = replace(stack(2), units=((keep, recompute),) * 4)
    base = problem.fixed.total + problem.around.embedding_kept + problem.around.head
    solution = solve(problem, budget_bytes=base + 220)
    assert solution.plan.actions == (Recompute(), Recompute(), Keep(), Keep())


def test_a_unit_with_one_option_keeps_it():
    problem = stack(4)
    bound = replace(problem, units=(problem.units[0][5:6], *problem.units[1:]))
    solution = solve(bound, budget_bytes=10**15)
    assert solution.plan.actions == (Recompute(), Keep(), Keep(), Keep())
    assert solution.assignment == (0, 0, 0, 0)


def test_a_model_without_units_has_an_empty_plan():
    problem = replace(stack(2), units=())
    solution = solve(problem, budget_bytes=10**12)
    assert (solution.assignment, solution.fits) == ((), True)
    assert not solve(problem, budget_bytes=1000).fits


def moving_problem():
    recompute = option(50, 60, 60, 0, 5.0, action=Recompute())
    offload = option(0, 60, 60, 0, 1.0, 40, action=Offload())
    return Problem(fixed=stack(2).fixed, around=stack(2).around, units=((recompute, offload),) * 3)


def test_room_elsewhere_goes_to_the_units_that_run_first():
    problem = moving_problem()
    solution = solve(problem, budget_bytes=10**15, moved_budget_bytes=100)
    assert solution.plan.actions == (Offload(), Offload(), Recompute())
    assert solution.assignment == (1, 1, 0)
    assert solution.seconds == seconds_of(problem, solution.assignment) == 7.0


def test_a_unit_that_can_only_move_needs_room():
    offload = (option(0, 60, 60, 0, 1.0, 40, action=RecomputeOffload()),)
    problem = replace(moving_problem(), units=(offload, offload))
    with pytest.raises(ValueError, match=r"unit 1 has only options that move bytes away, and 20"):
        solve(problem, budget_bytes=10**15, moved_budget_bytes=60)

from dataclasses import replace

import pytest

from benchmarks.planner_problems import budgets, kept_seconds, stack
from rematic.planner import best_of_all, peak_of, seconds_of, solve
from rematic.planner.milp import solve_exactly
from tests.planner.problems import under_autocast

pytest.importorskip("scipy", reason="the oracle needs the extra planner-oracle")


@pytest.mark.parametrize("seed", range(3))
def test_the_solver_and_brute_force_agree(seed):
    problem = stack(5, seed=seed, num_actions=4)
    for budget in budgets(problem, 4):
        answer = solve_exactly(problem, budget_bytes=budget)
        best = best_of_all(problem, budget_bytes=budget)
        assert answer.is_proved
        assert seconds_of(problem, answer.assignment) == pytest.approx(seconds_of(problem, best))
        assert answer.bound_seconds == pytest.approx(seconds_of(problem, best))


@pytest.mark.parametrize("seed", range(3))
def test_inputs_that_callers_hold_are_in_the_rows_of_forward(seed):
    problem = stack(5, seed=seed, num_actions=4)
    held = max(option.forward_bytes for options in problem.units for option in options)
    first = tuple(
        replace(option, late_bytes=held if option.action.name == "recompute" else 0)
        for option in problem.units[0]
    )
    problem = replace(problem, units=(first, *problem.units[1:]))
    for budget in budgets(problem, 6):
        answer = solve_exactly(problem, budget_bytes=budget)
        best = best_of_all(problem, budget_bytes=budget)
        found = answer.assignment
        assert (found is None) == (best is None)
        if best is not None:
            assert seconds_of(problem, found) == pytest.approx(seconds_of(problem, best))


@pytest.mark.parametrize("seed", range(3))
def test_copies_of_weights_that_autocast_makes_are_in_the_rows(seed):
    problem = under_autocast(stack(5, seed=seed, num_actions=4))
    for budget in budgets(problem, 6):
        best = best_of_all(problem, budget_bytes=budget)
        found = solve_exactly(problem, budget_bytes=budget).assignment
        assert (found is None) == (best is None)
        if best is not None:
            assert seconds_of(problem, found) == pytest.approx(seconds_of(problem, best))


def test_a_budget_that_nothing_fits_into_is_proved_to_be_one():
    problem = stack(5)
    answer = solve_exactly(problem, budget_bytes=budgets(problem, 2)[0] - 2**21)
    assert (answer.assignment, answer.is_proved) == (None, True)
    assert answer.bound_seconds == float("inf")


def test_a_stack_of_32_is_planned_within_one_per_cent_of_the_optimum():
    problem = stack(32, seed=1)
    for budget in budgets(problem, 6)[1:-1]:
        answer = solve_exactly(problem, budget_bytes=budget, time_limit_seconds=5)
        solution = solve(problem, budget_bytes=budget)
        assert solution.peak.total <= budget
        # The bound holds on a machine too busy to prove an optimum, but is a little lower then.
        whole = kept_seconds(problem)
        assert whole + solution.seconds <= 1.01 * (whole + answer.bound_seconds)
        assert peak_of(problem, answer.assignment).total <= budget * (1 + 1e-6)

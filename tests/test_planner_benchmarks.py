"""Slices of benchmarks/plan_lengths.py and benchmarks/planner_peers.py."""

from __future__ import annotations

import pytest

from benchmarks.plan_lengths import LONGEST, lengths_of, make_steps, measure
from benchmarks.planner_peers import peers
from benchmarks.planner_problems import budgets, keep_or_recompute, stack
from rematic.planner import Pace, peak_of, seconds_of, solve

PACE = Pace(
    op_seconds=lambda op: max(op.flops / 5e10, op.touched_bytes / 1e10),
    replay_seconds=1e-3,
    selective_seconds=3e-3,
    moved_bytes_per_second=5e8,
)
"""A CPU that is the same on every machine."""


def test_both_distributions_of_lengths_have_their_shape() -> None:
    corpus, drawn = lengths_of("corpus"), lengths_of("log-normal")
    assert min(corpus) >= 64
    assert max(corpus) == max(drawn) == LONGEST
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(284, rel=0.03)


def test_plans_by_length_are_as_fast_as_the_optimum_and_faster_than_fixed_mixes() -> None:
    steps = make_steps(PACE, num_layers=3)
    lengths = [128, 400, 401, 900, LONGEST]
    row = measure(steps, "a few", lengths, 0.5)
    assert row.documents == 5
    assert 1 - 1e-9 <= row.time_vs_optimum <= 1.01
    assert row.time_vs_full < row.time_vs_best_static_list <= 1 + 1e-9
    assert row.time_vs_full < row.time_vs_best_static_sets <= 1 + 1e-9


def test_no_peer_that_keeps_or_recomputes_is_faster_within_the_budget() -> None:
    problem = keep_or_recompute(stack(12, seed=0))
    budget = budgets(problem, 3)[1]
    ours = solve(problem, budget_bytes=budget).seconds
    found = {}
    for name, peer, _ in peers():
        plans = [peer(problem, share / 8) for share in range(9)]
        fitting = [p for p in plans if p and peak_of(problem, p).total <= budget]
        found[name] = min(seconds_of(problem, plan) for plan in fitting)
    assert {"greedy_knapsack", "ilp_knapsack", "dp_knapsack"} <= set(found)
    assert all(seconds >= ours - 1e-9 for seconds in found.values())

"""What a step of one shape would need and take under the policies that people choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rematic.planner.frontier import Pace, listed_option, problem_of
from rematic.planner.problem import FixedBytes, Peak, Problem, intervals_of, peak_of, seconds_of
from rematic.planner.schedules import every_kth, every_unit, in_segments, sqrt_segments
from rematic.planner.smallest import smallest_assignment
from rematic.planner.solve import solve
from rematic.planner.unit_costs import StepCosts
from rematic.policy import Action

BACKWARD_FORWARDS = 2
"""Backward is reckoned as so many forwards: two products for each one of forward."""


@dataclass(frozen=True, kw_only=True)
class PolicyForecast:
    """A step under one policy."""

    policy: str
    """Name of the policy, as in `POLICIES`."""

    plan: dict[str, int]
    """Number of units by action; of segments, where units are recomputed together."""

    peak: Peak
    """Where the step is highest."""

    seconds: float
    """Time of forward and backward."""

    slow_down: float
    """Time over that with everything kept, less one: 0.33 is a third longer."""

    fits: bool
    """Whether the peak is within the budget."""

    intervals: tuple[Peak, ...]
    """The highest moment of each interval of the step, in order."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step of one shape under each policy."""

    batch: int
    """Sequences."""

    length: int
    """Tokens of each."""

    budget_bytes: int
    """Bytes that the peak may reach."""

    fixed: FixedBytes
    """What is live when the step starts."""

    policies: tuple[PolicyForecast, ...]
    """By policy, from none to the planner's own."""

    smallest_bytes: int
    """The lowest peak of any plan that keeps to the terms: what the budget has to be at least."""

    without_head_bytes: int
    """The planner's peak if head and loss needed nothing: how far a tiled loss can bring it."""

    @property
    def planned(self) -> PolicyForecast:
        """The planner's own."""
        return self.policies[-1]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a plan has to keep to."""

    budget_bytes: int
    """Bytes that the peak may reach."""

    given: tuple[Action | None, ...] | None = None
    """For each unit the action that a rule gives it, or None. Only the planner's own plan keeps to
    them; the other policies are what their names say."""


_Choice = tuple[Problem, tuple[int, ...]]


def _keep(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    problem = problem_of(costs, pace, allowed=("keep",))
    return problem, every_unit(problem, "keep")


def _recompute(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    problem = problem_of(costs, pace, allowed=("recompute",))
    return problem, every_unit(problem, "recompute")


def _every_second(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    problem = problem_of(costs, pace, allowed=("keep", "recompute"))
    return problem, every_kth(problem, "recompute", rest="keep", k=2)


def _segments(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    lengths = sqrt_segments(len(costs.unit_classes))
    problem = problem_of(costs, pace, allowed=("keep", "recompute"))
    return in_segments(problem, lengths), (0,) * len(lengths)


def _op_list(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    options = [(listed_option(unit, pace),) for unit in costs.classes]
    bare = problem_of(costs, pace, allowed=("recompute",))
    problem = replace(bare, units=tuple(options[i] for i in costs.unit_classes))
    return problem, every_unit(problem, "selective")


def _planned(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    problem = problem_of(costs, pace, given=terms.given)
    return problem, solve(problem, budget_bytes=terms.budget_bytes).assignment


def _lightest(costs: StepCosts, pace: Pace, terms: Terms) -> _Choice:
    problem = problem_of(costs, pace, given=terms.given)
    return problem, smallest_assignment(problem)


POLICIES: dict[str, Callable[[StepCosts, Pace, Terms], _Choice]] = {
    "keep all": _keep,
    "recompute all": _recompute,
    "every second block": _every_second,
    "sqrt(N) segments": _segments,
    "op list": _op_list,
    "planned": _planned,
}
"""From costs, pace and terms to a problem and an assignment."""


def forecast_step(costs: StepCosts, pace: Pace, terms: Terms) -> Forecast:
    """Returns what a step would need and take under each policy.

    Args:
        costs: What was measured of steps of that shape.
        pace: How fast the device is.
        terms: What a plan has to keep to.
    """
    without_plan = kept_seconds(costs, pace)
    rows = []
    for name, choose in POLICIES.items():
        problem, assignment = choose(costs, pace, terms)
        rows.append(
            _row(
                name,
                problem,
                assignment,
                kept_seconds=without_plan,
                budget_bytes=terms.budget_bytes,
            )
        )
    without = 0 if problem.around.head_uncast is not None else None
    headless = replace(problem, around=replace(problem.around, head=0, head_uncast=without))
    return Forecast(
        batch=costs.batch,
        length=costs.length,
        budget_bytes=terms.budget_bytes,
        fixed=costs.fixed,
        policies=tuple(rows),
        smallest_bytes=peak_of(problem, smallest_assignment(problem)).total,
        without_head_bytes=peak_of(headless, assignment).total,
    )


def forward_seconds(costs: StepCosts, pace: Pace) -> float:
    """Returns the time of one forward of the whole model.

    A unit takes no less than the host does, which is reckoned as long as for a replay of it, where
    the host works beside the device.
    """
    by_class = [sum(pace.op_seconds(op) for op in unit.ops) for unit in costs.classes]
    if pace.overlaps_host:
        by_class = [max(seconds, pace.replay_seconds) for seconds in by_class]
    around = sum(pace.op_seconds(op) for op in costs.around_ops)
    return around + sum(by_class[i] for i in costs.unit_classes)


def kept_seconds(costs: StepCosts, pace: Pace) -> float:
    """Returns the time of forward and backward with everything kept."""
    return forward_seconds(costs, pace) * (1 + BACKWARD_FORWARDS)


def longest_length(
    costs_at: Callable[[int], StepCosts],
    pace: Pace,
    terms: Terms,
    *,
    policy: str,
    max_length: int,
) -> int:
    """Returns the longest sequence that fits under a policy; 0 if none does.

    Args:
        costs_at: Returns what was measured of steps at a length.
        pace: How fast the device is.
        terms: What a plan has to keep to.
        policy: One of `POLICIES`.
        max_length: Longest sequence that is of interest.

    Raises:
        ValueError: If there is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: expected one of {', '.join(POLICIES)}.")

    # The planner's own fits if its lightest plan does, and that asks for no solving.
    choose = _lightest if policy == "planned" else POLICIES[policy]

    def fits(length: int) -> bool:
        problem, assignment = choose(costs_at(length), pace, terms)
        return peak_of(problem, assignment).total <= terms.budget_bytes

    low, high = 0, max_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _row(
    name: str,
    problem: Problem,
    assignment: tuple[int, ...],
    *,
    kept_seconds: float,
    budget_bytes: int,
) -> PolicyForecast:
    intervals = tuple(intervals_of(problem, assignment))
    peak = peak_of(problem, assignment)
    extra = seconds_of(problem, assignment)
    names = [
        options[choice].action.name
        for options, choice in zip(problem.units, assignment, strict=True)
    ]
    return PolicyForecast(
        policy=name,
        plan={action: names.count(action) for action in dict.fromkeys(names)},
        peak=peak,
        seconds=kept_seconds + extra,
        slow_down=extra / kept_seconds if kept_seconds else 0.0,
        fits=peak.total <= budget_bytes,
        intervals=intervals,
    )

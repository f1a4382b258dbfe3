"""Decides which plan is fastest within a budget. No torch in here."""

from rematic.planner.brute_force import best_of_all as best_of_all
from rematic.planner.frontier import LOSSLESS as LOSSLESS
from rematic.planner.frontier import Pace as Pace
from rematic.planner.frontier import options_of as options_of
from rematic.planner.frontier import problem_of as problem_of
from rematic.planner.problem import FixedBytes as FixedBytes
from rematic.planner.problem import Option as Option
from rematic.planner.problem import Peak as Peak
from rematic.planner.problem import Problem as Problem
from rematic.planner.problem import Surroundings as Surroundings
from rematic.planner.problem import moved_bytes_of as moved_bytes_of
from rematic.planner.problem import peak_of as peak_of
from rematic.planner.problem import seconds_of as seconds_of
from rematic.planner.solve import Solution as Solution
from rematic.planner.solve import solve as solve
from rematic.planner.unit_costs import ActionBytes as ActionBytes
from rematic.planner.unit_costs import OpCost as OpCost
from rematic.planner.unit_costs import StepCosts as StepCosts
from rematic.planner.unit_costs import UnitCosts as UnitCosts

"""Decides which plan is fastest within a budget. No torch in here."""

from rematic.planner.problem import FixedBytes as FixedBytes
from rematic.planner.problem import Option as Option
from rematic.planner.problem import Peak as Peak
from rematic.planner.problem import Problem as Problem
from rematic.planner.problem import Surroundings as Surroundings
from rematic.planner.problem import moved_bytes_of as moved_bytes_of
from rematic.planner.problem import peak_of as peak_of
from rematic.planner.problem import seconds_of as seconds_of
from rematic.planner.unit_costs import ActionBytes as ActionBytes
from rematic.planner.unit_costs import OpCost as OpCost
from rematic.planner.unit_costs import StepCosts as StepCosts
from rematic.planner.unit_costs import UnitCosts as UnitCosts

"""Decides before and between steps: the plan of a step, the history of policies. No torch."""

from rematic.control.curve import Curve as Curve
from rematic.control.escalation import FirstAttempt as FirstAttempt
from rematic.control.escalation import Rung as Rung
from rematic.control.escalation import escalate as escalate
from rematic.control.history import History as History
from rematic.control.history import HistoryEntry as HistoryEntry
from rematic.control.history import pinned as pinned
from rematic.control.history import rolled_back as rolled_back
from rematic.control.history import switched as switched
from rematic.control.history import unpinned as unpinned
from rematic.control.plain import costs_from_plain as costs_from_plain
from rematic.control.plain import costs_to_plain as costs_to_plain
from rematic.control.plain import history_from_plain as history_from_plain
from rematic.control.plain import history_to_plain as history_to_plain
from rematic.control.step_plan import Costs as Costs
from rematic.control.step_plan import StepDecision as StepDecision
from rematic.control.step_plan import StepOutcome as StepOutcome
from rematic.control.step_plan import StepRequest as StepRequest
from rematic.control.step_plan import kept_key as kept_key
from rematic.control.step_plan import learn as learn
from rematic.control.step_plan import plan_step as plan_step
from rematic.control.stop_report import FailedAttempt as FailedAttempt
from rematic.control.stop_report import StopReport as StopReport
from rematic.control.stop_report import advise as advise
from rematic.control.stop_report import format_stop as format_stop
from rematic.control.stop_report import largest_length as largest_length

"""Decides what happens to each unit: actions, rules, policies, plans. No torch in here."""

from rematic.policy.actions import ACTIONS as ACTIONS
from rematic.policy.actions import Action as Action
from rematic.policy.actions import Keep as Keep
from rematic.policy.actions import Recompute as Recompute
from rematic.policy.actions import Selective as Selective
from rematic.policy.actions import action_named as action_named
from rematic.policy.op_names import DEFAULT_SAVED as DEFAULT_SAVED
from rematic.policy.op_names import OP_GROUPS as OP_GROUPS
from rematic.policy.op_names import OpName as OpName
from rematic.policy.op_names import parse_op_name as parse_op_name
from rematic.policy.plain import policy_from_plain as policy_from_plain
from rematic.policy.plain import policy_to_plain as policy_to_plain
from rematic.policy.policy import KEEP as KEEP
from rematic.policy.policy import LADDER as LADDER
from rematic.policy.policy import PLANNED as PLANNED
from rematic.policy.policy import RECOMPUTE as RECOMPUTE
from rematic.policy.policy import SELECTIVE as SELECTIVE
from rematic.policy.policy import Plan as Plan
from rematic.policy.policy import Policy as Policy
from rematic.policy.policy import policy_named as policy_named
from rematic.policy.policy import resolve as resolve
from rematic.policy.rules import Rule as Rule
from rematic.policy.rules import match_names as match_names

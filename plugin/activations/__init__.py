"""Applies a plan: units, records whose tensors can be evicted, replays, retry of one op."""

from rematic.activations.engine import Engine as Engine
from rematic.activations.ledger import Eviction as Eviction
from rematic.activations.ledger import Ledger as Ledger
from rematic.activations.notices import Notice as Notice
from rematic.activations.op_retry import OpRetry as OpRetry
from rematic.activations.replay import ReplayError as ReplayError
from rematic.activations.replay import replaying as replaying
from rematic.activations.step_meter import StepMeter as StepMeter
from rematic.activations.token_wise_parts import PartsMode as PartsMode
from rematic.activations.unit import Unit as Unit
from rematic.activations.units import find_units as find_units

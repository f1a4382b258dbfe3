"""Measures what a step costs: traces with fake tensors, and polynomials through them."""

from rematic.cost.batches import language_model_batch as language_model_batch
from rematic.cost.optimizer_bytes import NO_OPTIMIZER as NO_OPTIMIZER
from rematic.cost.optimizer_bytes import OptimizerBytes as OptimizerBytes
from rematic.cost.optimizer_bytes import adam_8bit_bytes as adam_8bit_bytes
from rematic.cost.optimizer_bytes import trace_optimizer as trace_optimizer
from rematic.cost.profile import StepProfile as StepProfile
from rematic.cost.recipe_profile import trace_recipe as trace_recipe
from rematic.cost.tracer import LOSSLESS as LOSSLESS
from rematic.cost.tracer import TraceSettings as TraceSettings
from rematic.cost.tracer import trace_profile as trace_profile

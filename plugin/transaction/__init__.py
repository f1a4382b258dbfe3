"""Undoes a failed attempt at a step: gradients, generators, buffers, module state, the batch."""

from rematic.transaction.collectives import ForeignCollectives as ForeignCollectives
from rematic.transaction.data_parallel import DataParallelStep as DataParallelStep
from rematic.transaction.data_parallel import abort_ranks as abort_ranks
from rematic.transaction.data_parallel import find_wrapper as find_wrapper
from rematic.transaction.data_parallel import num_ranks as num_ranks
from rematic.transaction.data_parallel import sharding_obstacle as sharding_obstacle
from rematic.transaction.data_parallel import this_rank as this_rank
from rematic.transaction.gradients import GradientContributions as GradientContributions
from rematic.transaction.gradients import RestoreError as RestoreError
from rematic.transaction.module_snapshot import ChangingState as ChangingState
from rematic.transaction.module_snapshot import ModuleSnapshot as ModuleSnapshot
from rematic.transaction.module_snapshot import TensorCopies as TensorCopies
from rematic.transaction.release import release_attempt as release_attempt
from rematic.transaction.step_transaction import StepTransaction as StepTransaction

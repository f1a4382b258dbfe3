"""Lightning callbacks, thin over a Session; importing them registers the strategies by name."""

from lightning.pytorch.strategies import StrategyRegistry

from rematic.callbacks.adaptive_recompute import AdaptiveRecompute as AdaptiveRecompute
from rematic.hosts.lightning import RecomputeStrategy
from rematic.hosts.lightning_ranks import (
    RecomputeDDPStrategy,
    RecomputeFSDPStrategy,
    RecomputeModelParallelStrategy,
)

for _strategy, _description in (
    (RecomputeStrategy, "One device, inside a memory budget"),
    (RecomputeDDPStrategy, "DDP, inside a memory budget per device"),
    (RecomputeFSDPStrategy, "FSDP, inside a memory budget per device"),
    (RecomputeModelParallelStrategy, "FSDP2, inside a memory budget per device"),
):
    StrategyRegistry.register(
        _strategy.strategy_name,
        _strategy,
        description=_description,
        override=True,  # importing twice changes nothing
    )

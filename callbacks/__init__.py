"""Lightning callbacks, thin over a Session; importing them registers the strategies by name."""

from lightning.pytorch.strategies import StrategyRegistry

from rematic.callbacks.adaptive_recompute import AdaptiveRecompute as AdaptiveRecompute
from rematic.hosts.lightning import RecomputeStrategy

StrategyRegistry.register(
    RecomputeStrategy.strategy_name,
    RecomputeStrategy,
    description="One device, inside a memory budget",
    override=True,  # importing twice changes nothing
)

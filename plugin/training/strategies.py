"""The Lightning strategy of a recipe: on one device, on several, sharded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rematic.hosts.lightning import RecomputeStrategy
from rematic.hosts.lightning_ranks import RecomputeDDPStrategy, RecomputeModelParallelStrategy
from rematic.hosts.lightning_strategy import SessionStrategy
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.recipes import Recipe


def build_strategy(
    recipe: Recipe, *, probe: Probe | None, journal: EventSink | None
) -> SessionStrategy:
    """The strategy that a recipe asks for.

    Args:
        recipe: The recipe.
        probe: Reads the memory of this process; None for what the recipe says.
        journal: Takes the decisions; None in processes that write nothing.
    """
    kind = recipe.distributed.strategy
    if kind == "ddp":
        return RecomputeDDPStrategy(recipe=recipe, probe=probe, journal=journal)
    if kind == "fsdp2":
        return RecomputeModelParallelStrategy(
            recipe=recipe, probe=probe, journal=journal, save_distributed_checkpoint=False
        )
    return RecomputeStrategy(recipe=recipe, probe=probe, journal=journal)


def whole_state(recipe: Recipe, model: nn.Module) -> Mapping[str, Tensor] | None:
    """All weights of a sharded model, on the host of the first process; None of one that is whole.

    Every process has to call it.
    """
    if recipe.distributed.strategy != "fsdp2":
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=recipe.saved == ("adapter",)
    )
    state = get_model_state_dict(model, options=options)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}

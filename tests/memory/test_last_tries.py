"""The tries that are left when nothing can be evicted."""

from __future__ import annotations

import pytest
import torch

import rematic
from rematic.memory import LastTries, SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe
from tests.activations.blocks import make_input, make_model
from tests.events import Events


def test_there_are_so_many() -> None:
    tries = LastTries(2)
    assert [tries.are_left, tries.take(), tries.take()] == [True, True, True]
    assert [tries.are_left, tries.take()] == [False, False]


@pytest.mark.parametrize("op_retry", ["always", "never"])
def test_memory_that_only_a_cycle_holds_is_found(op_retry: str) -> None:
    """Before any record could give way: in the first forward, or in the first unit of it."""
    model, journal, probe = make_model(), Events(), SimulatedProbe()
    recipe = Recipe(policy=PolicyConfig(op_retry=op_retry))
    session = rematic.attach(
        model, policy="recompute", budget="1GiB", probe=probe, recipe=recipe, journal=journal
    )
    x = make_input()
    with session.step(x):
        model(x).backward()
    with probe:
        waste = [torch.ones(1 << 20)]
        waste.append(waste)  # type: ignore[arg-type]
        del waste
        probe.budget_bytes = probe.allocated_bytes()
        with session.step(x):
            output = model(x)  # no room for it but where the cycle lies
            probe.budget_bytes = None
            output.backward()
    (retry,) = journal.of("retry")
    assert (retry["level"], retry["bytes_freed"]) == ("op" if op_retry == "always" else "unit", 0)
    session.detach()

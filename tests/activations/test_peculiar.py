"""Contract 1 over peculiar modules and steps: inputs, ownership, state, autograd, ambient state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.activations import peculiar_arguments, peculiar_autograd, peculiar_state
from tests.activations.parity import Outcome, attached, differences, read_outcome
from tests.activations.peculiar import Case

CASES = (*peculiar_arguments.CASES, *peculiar_state.CASES, *peculiar_autograd.CASES)


def build(case: Case) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([case.block() for _ in range(case.number)])


def drive(case: Case, blocks: nn.ModuleList, evict: Callable[[], object]) -> Outcome:
    torch.manual_seed(9)
    return read_outcome(blocks, list(case.drive(blocks, evict)))


@functools.cache
def plain_outcome(case: Case) -> Outcome:
    return drive(case, build(case), lambda: None)


@pytest.mark.parametrize("start", ["kept", "recomputed", "kept-then-evicted"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_peculiar_step_has_the_bits_of_the_plain_one(case: Case, start: str) -> None:
    model = nn.Sequential(build(case))
    with attached(model, kept=start != "recomputed") as engine:
        assert len(engine.units) == case.number

        def evict() -> None:
            if start == "kept-then-evicted":
                engine.ledger.evict(1 << 40)

        found = drive(case, model[0], evict)
    assert differences(found, plain_outcome(case)) == []
    num_replays = engine.ledger.counts.replays.total()
    assert (num_replays > 0) == (case.replayed and start != "kept")

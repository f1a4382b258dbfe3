"""When the retry at the op covers an optimizer's step, in a session that trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import rematic
from rematic.activations import OpRetry
from rematic.memory import SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe
from tests.activations.blocks import make_input, make_model


@pytest.mark.parametrize(
    ("budget", "capacity", "op_retry", "covered"),
    [
        ("1GiB", 1 << 30, "auto", [True, False, False]),
        ("1GiB", 1 << 30, "always", [True, True, True]),
        ("1GiB", 1 << 30, "never", [False, False, False]),
        ("2KiB", 1 << 30, "auto", [True, True, True]),
        ("1GiB", 1 << 10, "auto", [True, True, True]),  # the recipe promises too much
        ("1GiB", None, "auto", [True, True, True]),
    ],
)
def test_updates_are_covered_until_there_is_known_to_be_room(
    budget: str, capacity: int | None, op_retry: Any, covered: list[bool]
) -> None:
    """The first one always is: nothing has told yet what is in use."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    probe = SimulatedProbe(capacity)
    session = rematic.attach(
        model,
        optimizer,
        recipe=Recipe(policy=PolicyConfig(op_retry=op_retry)),
        budget=budget,
        probe=probe,
    )
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(isinstance(_get_current_dispatch_mode(), OpRetry))
    )
    optimizer.step()
    for _ in range(len(covered) - 1):
        with session.step(make_input()):
            model(make_input()).backward()
        optimizer.step()
    assert seen == covered


def test_an_update_inside_of_an_open_step_is_covered() -> None:
    """Manual optimization: what backward has left of the records is not counted yet."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    probe = SimulatedProbe(1 << 30)
    session = rematic.attach(model, optimizer, budget="1GiB", probe=probe)
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(isinstance(_get_current_dispatch_mode(), OpRetry))
    )
    for _ in range(3):
        with session.step(make_input()):
            model(make_input()).backward()
            optimizer.step()
    assert seen == [True, True, True]

"""Loss scaling, which Accelerate refuses on a CPU: it is set by hand."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from tests.hosts.accelerate_loops import Faults, fresh_accelerator, plugin_for, train


def scaled(accumulate: int) -> Accelerator:
    """An Accelerator as `mixed_precision="fp16"` makes it on a GPU; the first scales overflow."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return accelerator


@pytest.mark.parametrize("accumulate", [1, 4])
def test_scales_skipped_steps_and_weights_are_those_without_failures(accumulate: int) -> None:
    """Of both kinds there are some: steps that overflow, and micro-batches that run again."""
    accelerator = scaled(accumulate)
    plain = train(accelerator=accelerator)
    assert accelerator.scaler.get_scale() < 2.0**20
    for policy, faults in {
        "recompute": Faults(),
        "keep": Faults(forward={3, 11}, loss={2, 9, 10}, backward={4, 5, 12}),
    }.items():
        other = scaled(accumulate)
        train(plugin_for(policy=policy), faults=faults, accelerator=other).is_same_as(plain)
        assert other.scaler.state_dict() == accelerator.scaler.state_dict()
        assert faults.num_fired == sum(map(len, faults.at.values()))

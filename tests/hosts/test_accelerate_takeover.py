"""Accelerate's own activation checkpointing is turned off while the plugin is attached."""

from __future__ import annotations

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin

from tests.hosts.accelerate_loops import fresh_accelerator, plugin_for


def test_the_key_people_know_is_taken_over_and_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case E2."""
    accelerator = fresh_accelerator()
    # without an accelerator device Accelerate makes none
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True
    )
    accelerator.state.fsdp_plugin = fsdp
    plugin = plugin_for().attach(accelerator)
    assert (fsdp.activation_checkpointing, fsdp.activation_checkpointing_offload) == (False, False)
    assert "fsdp_activation_checkpointing is taken over by rematic" in caplog.text
    assert "does not put random numbers back" in caplog.text
    plugin.detach()
    assert (fsdp.activation_checkpointing, fsdp.activation_checkpointing_offload) == (True, True)


def test_a_key_that_is_off_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = fresh_accelerator()
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator.state.fsdp_plugin = fsdp
    plugin_for().attach(accelerator).detach()
    assert not fsdp.activation_checkpointing
    assert caplog.text == ""


def test_a_disabled_plugin_leaves_the_key_alone() -> None:
    accelerator = fresh_accelerator()
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    accelerator.state.fsdp_plugin = fsdp
    plugin_for(enabled=False).attach(accelerator)
    assert fsdp.activation_checkpointing

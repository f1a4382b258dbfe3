"""Trainers of TRL with the plugin train as without it, whatever fails in between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import rematic
from tests.hosts.accelerate_loops import Faults, plugin_for

if sys.version_info < (3, 11):
    pytest.skip("trl needs Python 3.11", allow_module_level=True)

from tests.hosts.trl_fits import KINDS, Trained, fit, make

pytestmark = pytest.mark.filterwarnings(
    # TRL 1.16 calls transformers, datasets and torch in ways that they deprecate.
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)
PLAIN = {"activation_checkpointing": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Trained] = {}

    def get(kind: str, **options: Any) -> Trained:
        key = (kind, *sorted(options.items()))
        if key not in known:
            known[key] = fit(tmp_path_factory.mktemp("plain"), kind, **PLAIN, **options)
        return known[key]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_ends_in_the_weights_of_one_without_checkpointing(
    plain: Any, tmp_path: Path, kind: str
) -> None:
    plugin = plugin_for(policy="recompute", recipe="auto")
    trained = fit(tmp_path, kind, plugin=plugin)
    trained.is_same_as(plain(kind))
    assert plugin.session is not None
    assert plugin.session.num_steps == trained.trainer.state.global_step
    assert plugin.session.last_step.replays == 3


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_not_seen_and_nothing_counts_twice(
    plain: Any, tmp_path: Path, kind: str
) -> None:
    """GRPO generates its answers anew, and the same ones."""
    faults = Faults(loss={1, 4, 9}, backward={2, 5})
    trained = fit(tmp_path, kind, faults=faults, plugin=plugin_for(policy="keep"))
    assert faults.num_fired == 5
    trained.is_same_as(plain(kind))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("SFT", {}), ("SFT", {"gradient_checkpointing": True}), ("DPO", {})],
    ids=["SFT", "SFT by the older name", "DPO"],
)
def test_checkpointing_that_is_on_by_default_is_taken_over(
    plain: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    arguments: dict[str, Any],
) -> None:
    """Cases A2 and E2: each block runs as often as the policy says."""
    plugin = plugin_for(policy="keep", recipe={"policy": {"trust": ["*"]}})
    trained = make(tmp_path, kind, plugin=plugin, **arguments)
    calls: list[str] = []
    for layer in trained.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append("mlp"))
    trained.trainer.train()
    trained.is_same_as(plain(kind))
    assert "activation_checkpointing of the TrainingArguments is taken over" in caplog.text
    assert len(calls) == 3 * 20
    assert not trained.model.is_activation_checkpointing
    plugin.detach()
    assert trained.trainer.args.activation_checkpointing
    assert trained.trainer.args.gradient_checkpointing


def test_offloading_is_recognised_as_a_second_owner(
    plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = plugin_for(policy="recompute", recipe={"policy": {"trust": ["*"]}})
    with monkeypatch.context() as patch:  # TRL 1.16 asks a CPU for the name of its accelerator
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        trained = make(tmp_path, "SFT", plugin=plugin, activation_offloading=True)
    trained.trainer.train()
    trained.is_same_as(plain("SFT"))
    assert "activation_offloading of TRL is turned off" in caplog.text
    assert plugin.session is not None
    assert plugin.session.last_step.replays == 3
    plugin.detach()
    held = trained.trainer.maybe_activation_offload_context
    assert type(held).__name__ == "OffloadActivations"


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_adapters_are_trained_and_saved_the_same(tmp_path: Path, kind: str) -> None:
    """Cases A1 and H1; DPO turns the adapters off inside its step, to compare with the base."""
    files = []
    for plugin in (None, plugin_for(policy="recompute", recipe="auto")):
        folder = tmp_path / str(plugin is None)
        trained = fit(
            folder,
            kind,
            plugin=plugin,
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
            max_steps=5,
            activation_checkpointing=plugin is not None,
        )
        trained.trainer.save_model(str(folder))
        files.append((folder / "adapter_model.safetensors").read_bytes())
        assert all(p.abs().sum() > 0 for n, p in trained.model.named_parameters() if "lora_B" in n)
    assert files[0] == files[1]
    assert plugin is not None
    assert plugin.session is not None
    assert plugin.session.last_step.replays == 3


@pytest.mark.parametrize(
    ("kind", "adapters"), [("SFT", False), ("SFT", True), ("DPO", False)], ids=str
)
def test_a_training_that_stops_goes_on_from_its_emergency_checkpoint(
    tmp_path: Path, kind: str, adapters: bool
) -> None:
    """In the second micro-batch of an update."""
    options: dict[str, Any] = {"max_steps": 6, "gradient_accumulation_steps": 2}

    def made(folder: Path, **more: Any) -> Trained:
        config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1) if adapters else None
        return make(folder, kind, peft_config=config, **options, **more)

    whole = made(tmp_path / "whole", **PLAIN)
    whole.trainer.train()
    faults = Faults(loss=set(range(8, 12)))
    stopped = made(tmp_path / "out", faults=faults, plugin=plugin_for(policy="keep"))
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        stopped.trainer.train()
    saved = tmp_path / "out" / "rematic-emergency" / "checkpoint-3"
    assert caught.value.report.checkpoint == str(saved)
    assert (saved / ("adapter_model.safetensors" if adapters else "model.safetensors")).is_file()
    again = made(tmp_path / "out", plugin=plugin_for(policy="keep"))
    again.trainer.train(resume_from_checkpoint=True)
    mine, theirs = again.model.state_dict(), whole.model.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []

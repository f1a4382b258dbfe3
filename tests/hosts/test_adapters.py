"""Adapters of PEFT in a loop of Accelerate: trained, saved and loaded as without the plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import fresh_accelerator, plugin_for

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TARGETS = ["q_proj", "v_proj"]


def in_whole(folder: Path, *, dora: bool = False) -> nn.Module:
    config = LoraConfig(target_modules=TARGETS, use_dora=dora, lora_dropout=0.1)
    return get_peft_model(build_llama("eager"), config)


def in_four_bits(folder: Path) -> nn.Module:
    if not folder.is_dir():
        build_llama("sdpa", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32
    )
    model = prepare_model_for_kbit_training(model)  # which turns checkpointing on
    torch.manual_seed(0)  # whether or not a model was written just now
    return get_peft_model(model, LoraConfig(target_modules=TARGETS, lora_dropout=0.1))


KINDS: dict[str, Callable[[Path], nn.Module]] = {
    "LoRA": in_whole,
    "DoRA": lambda folder: in_whole(folder, dora=True),
    "QLoRA": in_four_bits,
}


def train(
    folder: Path,
    kind: str,
    plugin: rematic.RecomputePlugin | None,
    *,
    state: Path | None = None,
    first: int = 0,
    last: int = 6,
) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Trains some steps; returns what `save_pretrained` wrote, and the trained weights.

    Args:
        folder: For the files.
        kind: Of `KINDS`.
        plugin: None for the plain loop, in which checkpointing is turned off.
        state: Folder of a state to go on from, saved at the end if nothing is there.
        first: First step.
        last: The step after the last one.
    """
    accelerator = fresh_accelerator()
    torch.manual_seed(0)
    model = KINDS[kind](folder / "base")
    if plugin is None:
        model.base_model.model.gradient_checkpointing_disable()
    else:
        plugin.attach(accelerator)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, 1e-2))
    if state is not None and state.is_dir():
        accelerator.load_state(str(state))

    def forward_backward(batch: dict[str, torch.Tensor]) -> None:
        accelerator.backward(model(**batch, use_cache=False).loss)

    step = forward_backward if plugin is None else plugin.step(forward_backward)
    for number in range(first, last):
        torch.manual_seed(number)
        ids = torch.randint(11, (2, 5 + number))
        step({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
    if state is not None and not state.is_dir():
        accelerator.save_state(str(state))
    saved = folder / f"saved {plugin is None}"
    accelerator.unwrap_model(model).save_pretrained(saved)
    if plugin is not None:
        assert plugin.session is not None
        assert plugin.session.last_step is not None
        assert plugin.session.last_step.replays == 3
        plugin.detach()
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    return files, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_the_same_and_states_load_both_ways(tmp_path: Path, kind: str) -> None:
    """Cases A1 and H1."""
    (files, weights), (plain_files, plain_weights) = (
        train(tmp_path, kind, plugin)
        for plugin in (plugin_for(policy="recompute", recipe="auto"), None)
    )
    assert files == plain_files
    assert "adapter_model.safetensors" in files
    assert all(value.abs().sum() > 0 for name, value in weights.items() if "lora_B" in name)
    # Accelerate 1.15 cannot load a state that it saved of 4-bit weights, with or without a plugin
    orders = [] if kind == "QLoRA" else [(True, False), (False, True)]
    for number, order in enumerate(orders):
        state = tmp_path / f"state {number}"
        for managed, (first, last) in zip(order, [(0, 3), (3, 6)], strict=True):
            plugin = plugin_for(policy="recompute", recipe="auto") if managed else None
            _, resumed = train(tmp_path, kind, plugin, state=state, first=first, last=last)
        assert all(torch.equal(resumed[name], plain_weights[name]) for name in plain_weights)

"""Adapters over 4-bit weights in a loop of Accelerate; rematic is the lines marked #.

Off:  accelerate launch --cpu examples/qlora.py
On:   rematic launch --config_file examples/qlora.yaml examples/qlora.py --model PATH

Without --model it writes a small random one. Needs `peft` and `bitsandbytes`, which runs NF4 on a
CPU too. Measured on nothing larger than a CPU.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from rematic import RecomputePlugin  #


def write_model() -> str:
    """Writes a small model with random weights; returns its folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return folder


def main() -> None:
    """Trains, and prints what rematic did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or name of a causal language model")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model or write_model(), quantization_config=four_bits, dtype=torch.float32
    )
    # Its gradient checkpointing stays off: rematic would take it over anyway.
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])).train()

    accelerator = Accelerator()
    plugin = RecomputePlugin.from_config().attach(accelerator)  # before prepare
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    @plugin.step  # runs again on the same batch if memory runs out
    def forward_backward(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        return loss.item()

    for number in range(arguments.documents):
        length = arguments.longest if number % 4 == 3 else arguments.longest // 8
        ids = (torch.arange(length, device=accelerator.device) * (number + 1) % 256).view(1, -1)
        loss = forward_backward(ids)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"{number}: {length} tokens, loss {loss:.4f}")
    if plugin.session is not None:  #
        accelerator.print(plugin.session.report())  #


if __name__ == "__main__":
    main()

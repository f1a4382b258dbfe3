"""A loop of Accelerate over documents of very different lengths; rematic is the lines marked #.

Off:  accelerate launch --cpu examples/accelerate_loop.py
On:   rematic launch --config_file examples/accelerate_loop.yaml examples/accelerate_loop.py

Measured on nothing larger than a CPU. Over several ranks a step is not run again as a whole.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from rematic import RecomputePlugin  #


def documents(number: int, *, longest: int) -> list[dict[str, torch.Tensor]]:
    """Makes token ids (1, seq): many short documents, a few long ones."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(number):
        length = longest if i % 4 == 3 else longest // 8
        ids = torch.randint(256, (1, length), generator=generator)
        found.append({"input_ids": ids, "labels": ids})
    return found


def main() -> None:
    """Trains, and prints what rematic did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    plugin = RecomputePlugin.from_config().attach(accelerator)  #
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 3e-4))

    @plugin.step  #
    def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        return loss.detach()

    for number, batch in enumerate(documents(arguments.documents, longest=arguments.longest)):
        with accelerator.accumulate(model):
            loss = forward_backward(batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"{number}: {batch['input_ids'].shape[1]} tokens, loss {loss:.3f}")
    if plugin.session is not None:  #
        accelerator.print(plugin.session.report())  #


if __name__ == "__main__":
    main()

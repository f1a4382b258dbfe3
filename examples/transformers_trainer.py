"""A Trainer of Transformers with LoRA; rematic is the lines marked #.

Off:  accelerate launch --cpu examples/transformers_trainer.py
On:   rematic launch --config_file examples/transformers_trainer.yaml \
          examples/transformers_trainer.py

Measured on nothing larger than a CPU. Not for nn.DataParallel and DeepSpeed.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rematic import RecomputePlugin  #


class Documents(Dataset[dict[str, torch.Tensor]]):
    """Token ids (seq,): many short documents, a few long ones."""

    def __init__(self, *, longest: int) -> None:
        self.longest = longest

    def __len__(self) -> int:
        """Returns how many there are."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns one of them."""
        length = self.longest if index % 4 == 3 else self.longest // 8
        ids = torch.arange(length) * (index + 1) % 256
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Trains, and prints what rematic did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM"))
    plugin = RecomputePlugin.from_config()  #
    trainer = Trainer(
        model=plugin.remember(model),  # gives `config.use_cache` back when training ends
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=arguments.steps,
            per_device_train_batch_size=1,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Documents(longest=arguments.longest),
    )
    plugin.attach_trainer(trainer)  #
    trainer.train()
    if plugin.session is not None:  #
        print(plugin.session.report())  #


if __name__ == "__main__":
    main()

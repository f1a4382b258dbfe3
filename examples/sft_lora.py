"""Supervised fine-tuning with TRL and LoRA; rematic is the lines marked #.

Off:  accelerate launch --cpu examples/sft_lora.py
On:   rematic launch --config_file examples/sft_lora.yaml examples/sft_lora.py

TRL checkpoints every block unless told not to; rematic takes that over, with a line. Needs
`trl` and `peft`. Measured on nothing larger than a CPU. Not for nn.DataParallel and DeepSpeed.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from rematic import RecomputePlugin  #

WORDS = [f"w{i}" for i in range(250)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words; yours comes from `from_pretrained`."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>", "<pad>", "<eos>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def make_documents(number: int, *, longest: int) -> Dataset:
    """Makes texts: many short ones, a few long ones."""
    lengths = [longest if i % 4 == 3 else longest // 8 for i in range(number)]
    texts = [" ".join(WORDS[i * j % 250] for j in range(n)) for i, n in enumerate(lengths)]
    return Dataset.from_list([{"text": text} for text in texts])


def main() -> None:
    """Trains, and prints what rematic did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    config = LlamaConfig(vocab_size=253, num_attention_heads=4, **sizes)
    plugin = RecomputePlugin.from_config()  #
    trainer = SFTTrainer(
        model=plugin.remember(LlamaForCausalLM(config)),  # for its `config.use_cache`
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=arguments.steps,
            max_length=arguments.longest,
            per_device_train_batch_size=1,
            logging_steps=4,
            bf16=False,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=make_documents(64, longest=arguments.longest),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM"),
    )
    plugin.attach_trainer(trainer)  #
    trainer.train()
    if plugin.session is not None:  #
        print(plugin.session.report())  #


if __name__ == "__main__":
    main()

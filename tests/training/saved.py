"""A model and a tokenizer as `save_pretrained` leaves them, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant {% endif %}"
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_model(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A Llama of 64 words, its tokenizer beside it."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    save_tokenizer(folder, template=template)
    return folder


def save_tokenizer(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    mask: bool = False,
    begins: bool = False,
) -> Path:
    """One token a word; `begins` puts the mark of the beginning before every text."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "hello", "bye", "now"]
    vocabulary = {word: at for at, word in enumerate([*words, *(["<mask>"] if mask else [])])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        **({"mask_token": "<mask>"} if mask else {}),
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder

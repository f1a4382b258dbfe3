"""Recipes, models and batches that are as small as they can be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rematic.recipes import DataConfig, Recipe, load_recipe
from rematic.training.batches import BatchMaker
from rematic.training.data import TrainingData, load_data
from rematic.training.examples import Example
from rematic.training.model_config import build_config
from rematic.training.prepared_model import prepare_model
from rematic.training.tokens import ByteTokenizer

TINY = (
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "data.max_documents=4",
    "data.max_length=48",
    "training.threads=1",
    "memory.budget=64MiB",
    "memory.heap_cap=false",
    "run.save=none",
)
ENCODER = (
    "model.task=masked-lm",
    "model.type=modernbert",
    "model.config={vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 2, max_position_embeddings: 128}",
)
T5 = (
    "model.task=seq2seq",
    "model.type=t5",
    "model.config={vocab_size: 320, d_model: 32, d_kv: 16, d_ff: 64, num_layers: 2, num_heads: 2}",
)


def tiny(*overrides: str) -> Recipe:
    """`tiny-cpu` with a model of 41,120 parameters and four documents of 48 tokens."""
    return load_recipe("tiny-cpu", [*TINY, *overrides])


def prepare(*overrides: str) -> tuple[Recipe, TrainingData, nn.Module]:
    """A recipe, its data and its model."""
    recipe = tiny(*overrides)
    data = load_data(recipe)
    config = build_config(
        recipe.model,
        max_length=data.max_length,
        num_tokens=data.num_tokens,
        num_labels=data.num_labels,
        marks=data.tokenizer.marks(),
    )
    return recipe, data, prepare_model(recipe, config=config)


def examples(documents: Sequence[Sequence[int]]) -> list[Example]:
    """Sequences whose every token has a loss."""
    return [Example(ids=tuple(ids), labels=tuple(ids)) for ids in documents]


def maker(data: DataConfig | None = None) -> BatchMaker:
    """Makes batches of bytes for a causal language model."""
    return BatchMaker(data or DataConfig(), task="causal-lm", tokenizer=ByteTokenizer(), seed=0)

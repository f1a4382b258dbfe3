"""What transformers and PEFT call the tasks of a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rematic.recipes.model_schema import Task


@dataclass(frozen=True, kw_only=True)
class TaskTraits:
    """One task."""

    words: str
    """What a model of it is called in messages."""
    auto_class: Any
    """The class of transformers that builds its models (untyped there)."""
    types: Mapping[str, object]
    """Types of the models that transformers has for it."""
    peft_name: str | None
    """`TaskType` of PEFT; None where PEFT has none."""
    example: str
    """Types to name in messages."""


TASKS: Mapping[Task, TaskTraits] = {
    "causal-lm": TaskTraits(
        words="causal language model",
        auto_class=AutoModelForCausalLM,
        types=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        peft_name="CAUSAL_LM",
        example="llama or gpt2",
    ),
    "masked-lm": TaskTraits(
        words="masked language model",
        auto_class=AutoModelForMaskedLM,
        types=MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        peft_name=None,
        example="modernbert or bert",
    ),
    "seq2seq": TaskTraits(
        words="sequence-to-sequence model",
        auto_class=AutoModelForSeq2SeqLM,
        types=MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        peft_name="SEQ_2_SEQ_LM",
        example="t5 or bart",
    ),
    "sequence-classification": TaskTraits(
        words="model for the classification of sequences",
        auto_class=AutoModelForSequenceClassification,
        types=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        peft_name="SEQ_CLS",
        example="modernbert or llama",
    ),
}


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the forward of a model takes an argument; of the one inside its adapter."""
    base = getattr(model, "get_base_model", None)
    kind = type(base() if callable(base) else model)
    return argument in _arguments(kind.forward)


@functools.lru_cache(maxsize=64)
def _arguments(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)

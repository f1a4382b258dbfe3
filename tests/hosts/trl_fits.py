"""Trainers of TRL over a tiny Llama and a tokenizer that is made here, without a network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, set_seed

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import Faults
from tests.hosts.trainer_fits import Logged, own

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

NUM_WORDS = 40


def tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w39`."""
    words = {f"w{i}": i for i in range(NUM_WORDS)}
    special = {"<unk>": NUM_WORDS, "<pad>": NUM_WORDS + 1, "<eos>": NUM_WORDS + 2}
    inner = Tokenizer(models.WordLevel({**words, **special}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def words(seed: int, number: int) -> str:
    """A text of so many words."""
    return " ".join(f"w{(seed * 7 + i * i) % NUM_WORDS}" for i in range(number))


def texts() -> Any:
    """Texts of very different lengths."""
    return datasets.Dataset.from_list([{"text": words(i, 3 + i * 5 % 17)} for i in range(24)])


def preferences() -> Any:
    """Prompts with an answer that is preferred and one that is not."""
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(i, 2 + i % 5),
                "chosen": " " + words(i + 1, 3 + i % 7),
                "rejected": " " + words(i + 2, 2 + i % 4),
            }
            for i in range(24)
        ]
    )


def small_model(**changes: Any) -> nn.Module:
    """A Llama with dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": NUM_WORDS + 3, "max_position_embeddings": 64, **changes}
    return build_llama("eager", **sizes)


def prompts() -> Any:
    """Prompts without answers."""
    return datasets.Dataset.from_list([{"prompt": words(i, 3 + i % 4)} for i in range(24)])


def num_different(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many different words each answer has."""
    return [float(len(set(text.split()))) for text in completions]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A trainer of TRL."""

    trainer: str
    config: str
    data: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    more: Callable[[], dict[str, Any]] = dict


KINDS: dict[str, Kind] = {
    "SFT": Kind(trainer="SFTTrainer", config="SFTConfig", data=texts, arguments={"max_length": 32}),
    "DPO": Kind(
        trainer="DPOTrainer",
        config="DPOConfig",
        data=preferences,
        arguments={"max_length": 32},
        more=lambda: {"ref_model": small_model()},
    ),
    "GRPO": Kind(  # generates inside its steps
        trainer="GRPOTrainer",
        config="GRPOConfig",
        data=prompts,
        arguments={
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 6,
            "logging_steps": 1,
        },
        more=lambda: {"reward_funcs": num_different},
    ),
}


@functools.cache
def faulty(name: str) -> Any:
    """Returns a trainer's class that runs out of memory where it is told to."""

    class FaultyTrainer(getattr(trl, name)):  # type: ignore[misc]
        faults = Faults()

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            result = super().compute_loss(model, inputs, return_outputs, **kwargs)
            if model.training:
                self.faults.point("loss")
                loss = result[0] if return_outputs else result
                loss.register_hook(lambda gradient: self.faults.point("backward"))
            return result

    return FaultyTrainer


class Trained:
    """What a training leaves."""

    def __init__(self, trainer: Any, logged: Logged) -> None:
        self.trainer = trainer
        self.logged = logged

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.trainer.model
        return model

    def is_same_as(self, other: Trained) -> None:
        """Asserts that two trainings agree to the bit, in what they count too."""
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        assert list(mine) == list(theirs)
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
        assert [own(logs) for logs in self.logged.logs] == [own(logs) for logs in other.logged.logs]
        assert self.trainer._metrics == other.trainer._metrics
        assert self.trainer._total_train_tokens == other.trainer._total_train_tokens


def make(
    folder: Path,
    kind: str,
    *,
    model: nn.Module | None = None,
    plugin: rematic.RecomputePlugin | None = None,
    faults: Faults | None = None,
    peft_config: Any = None,
    **arguments: Any,
) -> Trained:
    """Makes a trainer, and attaches the plugin to it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    chosen = KINDS[kind]
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        **chosen.arguments,
        **arguments,
    }
    set_seed(1)
    net = model or small_model()
    if plugin is not None:
        plugin.remember(net)
    logged = Logged()
    trainer = faulty(chosen.trainer)(
        model=net,
        args=getattr(trl, chosen.config)(**given),
        train_dataset=chosen.data(),
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=[logged],
        # with adapters, which it can turn off, DPO needs no second model
        **({} if peft_config is not None and kind == "DPO" else chosen.more()),
    )
    trainer.faults = faults or Faults()
    if plugin is not None:
        plugin.attach_trainer(trainer)
    return Trained(trainer, logged)


def fit(folder: Path, kind: str, **options: Any) -> Trained:
    """Makes a trainer and trains."""
    trained = make(folder, kind, **options)
    trained.trainer.train()
    return trained

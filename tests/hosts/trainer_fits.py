"""A small Llama, its data, and a Trainer that notes all that a user could see of a training."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import Faults


class Texts(Dataset[dict[str, Tensor]]):
    """Forty sequences of twelve tokens, some of them padded."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(12) * (index + 1)) % 11
        mask = torch.ones(12, dtype=torch.long)
        mask[: index % 3] = 0
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


class FaultyTrainer(Trainer):
    """Runs out of memory where it is told to, and counts as TRL's trainers do."""

    faults: Faults

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        self._total_train_tokens += inputs["input_ids"].numel()
        self._metrics["train"]["seen"].append(float(inputs["input_ids"].sum()))
        result = super().compute_loss(model, inputs, return_outputs, **kwargs)
        if model.training:
            self.faults.point("loss")
            loss = result[0] if return_outputs else result
            loss.register_hook(lambda gradient: self.faults.point("backward"))
        return result


class Logged(TrainerCallback):
    """What `report_to` would be given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@dataclass
class Trained:
    """What a training leaves."""

    trainer: FaultyTrainer
    logged: Logged

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    def is_same_as(self, other: Trained) -> None:
        """Asserts that two trainings agree to the bit."""
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        assert list(mine) == list(theirs)
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
        assert [own(logs) for logs in self.logged.logs] == [own(logs) for logs in other.logged.logs]
        assert self.trainer._metrics == other.trainer._metrics
        assert self.trainer._total_train_tokens == other.trainer._total_train_tokens
        assert self.trainer.state.num_input_tokens_seen == other.trainer.state.num_input_tokens_seen
        assert self.trainer.state.global_step == other.trainer.state.global_step


def own(logs: dict[str, Any]) -> dict[str, Any]:
    """Leaves out times and the figures of rematic."""
    own = {k: v for k, v in logs.items() if not k.startswith("rematic/")}
    return {k: v for k, v in own.items() if not k.endswith(("time", "per_second"))}


def make(
    folder: Path,
    *,
    model: nn.Module | None = None,
    faults: Faults | None = None,
    plugin: rematic.RecomputePlugin | None = None,
    **arguments: Any,
) -> Trained:
    """Makes a Trainer, and attaches the plugin to it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    given: dict[str, Any] = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": False,
        **arguments,
    }
    set_seed(1)
    net = model or build_llama("eager")
    if plugin is not None:
        plugin.remember(net)
    logged = Logged()
    trainer = FaultyTrainer(
        model=net,
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=[logged],
    )
    trainer.faults = faults or Faults()
    if plugin is not None:
        plugin.attach_trainer(trainer)
    return Trained(trainer=trainer, logged=logged)


def fit(folder: Path, *, resume: bool = False, **options: Any) -> Trained:
    """Makes a Trainer and trains."""
    trained = make(folder, **options)
    trained.trainer.train(resume_from_checkpoint=resume)
    return trained

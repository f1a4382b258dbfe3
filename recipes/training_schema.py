"""What a recipe says of how a model is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    instance,
    number_from_zero,
    one_of,
    positive_number,
    require,
    whole_number,
)
from rematic.recipes.optimizer_schema import AdamWConfig, OptimizerConfig

Precision: TypeAlias = Literal["fp32", "bf16"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the model is trained."""

    epochs: int = 1
    """Times each document is seen; default 1."""
    max_steps: int | None = None
    """Optimizer steps after which training ends; None (default): by epochs alone."""
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    """How weights are updated; default AdamW of torch."""
    learning_rate: float = 3.0e-4
    """Learning rate after warm-up; default 3.0e-4."""
    weight_decay: float = 0.01
    """Weight decay, for matrices only; default 0.01."""
    schedule: Schedule = "constant"
    """Of the rate after warm-up: `constant` (default), `linear` or `cosine` to final_share."""
    final_share: float = 0.0
    """Share of the rate that the last step has under a schedule that falls; default 0."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0; default 0."""
    clip_norm: float | None = 1.0
    """Largest norm of all gradients together; None: no clipping. Default 1.0."""
    accumulate: int = 1
    """Micro-batches per optimizer step; default 1."""
    precision: Precision = "fp32"
    """`fp32` (default): no autocast; `bf16`: autocast to bfloat16."""
    seed: int = 0
    """Seed of weights, order of documents and dropout, 0 to 2**32 - 1; default 0."""
    threads: int | None = None
    """CPU threads of torch; None (default): torch's own choice."""

    def __post_init__(self) -> None:
        whole_number(self, "epochs", minimum=1, remedy="write max_steps for less than one epoch")
        whole_number(
            self, "max_steps", minimum=1, optional=True, remedy="write null to end by epochs"
        )
        instance(self, "optimizer", kind=get_args(OptimizerConfig), remedy="write AdamWConfig()")
        positive_number(self, "learning_rate", remedy="write for example 3.0e-4")
        number_from_zero(self, "weight_decay", remedy="write 0 for none")
        one_of(self, "schedule", choices=get_args(Schedule), remedy="write constant where unsure")
        number_from_zero(self, "final_share", below=1, remedy="write a share such as 0.1")
        require(
            self,
            "final_share",
            self.schedule != "constant" or self.final_share == 0,
            expected="0, since the schedule is constant",
            remedy="write schedule: cosine, or remove it",
        )
        whole_number(self, "warmup_steps", minimum=0, remedy="write 0 for none")
        positive_number(self, "clip_norm", optional=True, remedy="write null for none")
        whole_number(
            self, "accumulate", minimum=1, remedy="write 1 for a step after each micro-batch"
        )
        one_of(self, "precision", choices=get_args(Precision), remedy="write fp32 where unsure")
        whole_number(self, "seed", minimum=0, maximum=_MAX_SEED, remedy="write for example 0")
        whole_number(
            self, "threads", minimum=1, optional=True, remedy="write null for torch's own choice"
        )

"""The optimizers that a recipe can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    number_from_zero,
    one_of,
    plain_mapping,
    positive_number,
    require,
    true_or_false,
)

_SAID_ELSEWHERE = frozenset({"params", "lr", "weight_decay"})
"""Arguments of optimizers that other keys of a recipe give."""

AdamWName: TypeAlias = Literal["adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW of torch, or of bitsandbytes: in 8 bits, in memory that is paged to the host."""

    name: AdamWName = "adamw"
    """Which one; default `adamw`, that of torch."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay of the means of gradient and squared gradient; default 0.9, 0.999."""
    eps: float = 1e-8
    """Added to the root of the second mean; default 1e-8."""

    def __post_init__(self) -> None:
        one_of(self, "name", choices=get_args(AdamWName), remedy="write adamw where unsure")
        require(
            self,
            "betas",
            _are_two_shares(self.betas),
            expected="two numbers of at least 0 and below 1",
            remedy="write [0.9, 0.999]",
        )
        positive_number(self, "eps", remedy="write for example 1.0e-8")


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    """Adafactor of torch (arXiv:1804.04235): a row and a column of squares for each matrix."""

    name: Literal["adafactor"] = "adafactor"
    """Tells the optimizer from the others."""
    beta2_decay: float = -0.8
    """Power of the step by which the decay of the squares approaches 1, below 0; default -0.8."""
    clip_threshold: float = 1.0
    """Largest root mean square of an update before it is scaled; default 1."""

    def __post_init__(self) -> None:
        require(
            self,
            "beta2_decay",
            _is_below_zero(self.beta2_decay),
            expected="a number below 0",
            remedy="write -0.8",
        )
        positive_number(self, "clip_threshold", remedy="write 1.0")


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent of torch."""

    name: Literal["sgd"] = "sgd"
    """Tells the optimizer from the others."""
    momentum: float = 0.0
    """Share of the update before that is added; default 0."""
    nesterov: bool = False
    """Whether the momentum looks ahead; default false."""

    def __post_init__(self) -> None:
        number_from_zero(self, "momentum", below=1, remedy="write for example 0.9")
        true_or_false(self, "nesterov")
        require(
            self,
            "nesterov",
            not self.nesterov or self.momentum > 0,
            expected="false, since momentum is 0",
            remedy="write momentum: 0.9",
        )


@dataclass(frozen=True, kw_only=True)
class TargetOptimizerConfig:
    """An optimizer by its import path; outside torch and bitsandbytes it needs --allow-code."""

    name: Literal["target"] = "target"
    """Tells the optimizer from the others."""
    _target_: str
    """Import path of the class, such as `torch.optim.RMSprop`; has no default."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments besides the rate and the weight decay, plain values; default none."""

    def __post_init__(self) -> None:
        require(
            self,
            "_target_",
            _is_import_path(self._target_),
            expected="the import path of a class",
            remedy="write for example torch.optim.RMSprop",
        )
        plain_mapping(self, "options")
        require(
            self,
            "options",
            not _SAID_ELSEWHERE & self.options.keys(),
            expected=f"none of {', '.join(sorted(_SAID_ELSEWHERE))}, which are not options",
            remedy="write training.learning_rate and training.weight_decay",
        )


OptimizerConfig: TypeAlias = AdamWConfig | AdafactorConfig | SGDConfig | TargetOptimizerConfig
"""How weights are updated; a recipe may write `optimizer: sgd` for the name alone."""


def _are_two_shares(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(one, float) and 0 <= one < 1 for one in value)


def _is_below_zero(value: object) -> bool:
    return isinstance(value, float) and value < 0


def _is_import_path(value: object) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) > 1 and all(part.isidentifier() for part in parts)

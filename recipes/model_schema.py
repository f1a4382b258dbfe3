"""What a recipe says of the model: where it comes from, and what it is trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    one_of,
    plain_mapping,
    require,
    some_text,
    true_or_false,
)

Task: TypeAlias = Literal["causal-lm", "masked-lm", "seq2seq", "sequence-classification"]
WeightsDtype: TypeAlias = Literal["fp32", "bf16"]
Attention: TypeAlias = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of transformers: written out with random weights, from the hub, or from a folder."""

    task: Task = "causal-lm"
    """What the model is trained for; chooses the head. Default `causal-lm`."""
    type: str | None = None
    """Model type as transformers names it, such as `llama`; None (default): no inline config."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Keys of the config class of that type, plain values; default: its own defaults."""
    id: str | None = None
    """Model of the hub whose weights are trained; None (default): random weights, or `path`."""
    path: str | None = None
    """Folder whose weights are trained, as `save_pretrained` leaves it; None (default): none."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub; None (default): its main branch."""
    dtype: WeightsDtype = "fp32"
    """Of the weights that are not quantized; default `fp32`."""
    attention: Attention = "auto"
    """Implementation of attention; `auto` (default): what transformers chooses."""
    trust_remote_code: bool = False
    """Whether code that comes with the weights may run; default false."""

    def __post_init__(self) -> None:
        one_of(self, "task", choices=get_args(Task), remedy="write causal-lm where unsure")
        some_text(self, "type", optional=True, remedy="write a model type such as llama")
        plain_mapping(self, "config")
        require(
            self,
            "config",
            self.type is not None or not self.config,
            expected="no keys, since there is no type whose keys they could be",
            remedy="name the type, such as type: llama, or remove config",
        )
        some_text(self, "id", optional=True, remedy="write a name such as Qwen/Qwen3-8B, or null")
        some_text(self, "path", optional=True, remedy="write the model's folder, or null")
        some_text(self, "revision", optional=True, remedy="write a tag or commit, or null")
        one_of(self, "dtype", choices=get_args(WeightsDtype), remedy="write fp32 where unsure")
        one_of(self, "attention", choices=get_args(Attention), remedy="write auto where unsure")
        true_or_false(self, "trust_remote_code")
        self._check_source()

    @property
    def has_saved_weights(self) -> bool:
        """Whether weights are loaded rather than drawn."""
        return self.id is not None or self.path is not None

    def _check_source(self) -> None:
        require(
            self,
            "path",
            self.path is None or self.id is None,
            expected=f"null, since id is {self.id!r}",
            remedy="remove one of the two",
        )
        require(
            self,
            "revision",
            self.revision is None or self.id is not None,
            expected="null, since no id names a model of the hub",
            remedy="remove it, or write id",
        )
        require(
            self,
            "trust_remote_code",
            not self.trust_remote_code or self.has_saved_weights,
            expected="false, since neither id nor path is given and no code comes with a config",
            remedy="remove it",
        )

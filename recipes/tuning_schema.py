"""What a recipe says of the weights: which are trained, and which are held in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    instances,
    number_from_zero,
    one_of,
    positive_number,
    require,
    true_or_false,
    whole_number,
)

Method: TypeAlias = Literal["full", "lora", "dora", "qlora"]
WrittenFormat: TypeAlias = Literal["auto", "none", "nf4", "fp4", "int8"]
WeightFormat: TypeAlias = Literal["none", "nf4", "fp4", "int8"]
ComputeDtype: TypeAlias = Literal["fp32", "bf16"]
StorageDtype: TypeAlias = Literal["uint8", "bf16", "fp32"]

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but the head."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """What is trained: every weight, or an adapter of PEFT over frozen weights."""

    method: Method = "full"
    """`full` (default), `lora`, `dora`, or `qlora`: LoRA over weights in 4 bits."""
    r: int = 16
    """Rank of the adapter; default 16."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / r; default 32."""
    dropout: float = 0.0
    """Dropout on the input of the adapter; default 0."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of the names of adapted layers, or `all-linear` (default): all but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of the names of modules that are trained whole beside the adapter; default none."""
    rslora: bool = False
    """Whether the scale is alpha / sqrt(r) instead (arXiv:2312.03732); default false."""

    def __post_init__(self) -> None:
        one_of(self, "method", choices=get_args(Method), remedy="write full for all weights")
        whole_number(self, "r", minimum=1, remedy="write for example 16")
        positive_number(self, "alpha", remedy="write for example 32")
        number_from_zero(self, "dropout", below=1, remedy="write 0 for none")
        instances(self, "targets", kind=str, remedy="write names such as [q_proj, v_proj]")
        require(
            self,
            "targets",
            bool(self.targets) and (ALL_LINEAR not in self.targets or len(self.targets) == 1),
            expected=f"names of layers, or {ALL_LINEAR} alone",
            remedy=f"write [{ALL_LINEAR}] where unsure",
        )
        instances(self, "modules_to_save", kind=str, remedy="write names such as [embed_tokens]")
        true_or_false(self, "rslora")
        if self.method == "full":
            self._refuse_what_an_adapter_needs()

    def _refuse_what_an_adapter_needs(self) -> None:
        for field in fields(self):
            if field.name != "method":
                require(
                    self,
                    field.name,
                    getattr(self, field.name) == field.default,
                    expected="nothing, since method is full and there is no adapter",
                    remedy="remove it, or write method: lora",
                )


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How bitsandbytes holds the frozen weights of linear layers."""

    format: WrittenFormat = "auto"
    """`none`, `nf4`, `fp4`, `int8`; `auto` (default): `nf4` for `qlora`, else `none`."""
    double: bool = True
    """Whether the scales of 4-bit weights are quantized too; default true."""
    compute_dtype: ComputeDtype = "bf16"
    """Type in which 4-bit weights are multiplied; default `bf16`."""
    storage_dtype: StorageDtype = "uint8"
    """Type of the tensors that hold 4-bit weights; FSDP needs model.dtype. Default `uint8`."""
    outlier_threshold: float = 6.0
    """Size above which columns of activations are multiplied in 16 bits by `int8`; default 6."""
    skip: tuple[str, ...] = ()
    """Names of layers that stay unquantized besides the head; default none."""

    def __post_init__(self) -> None:
        one_of(self, "format", choices=get_args(WrittenFormat), remedy="write auto where unsure")
        true_or_false(self, "double")
        one_of(self, "compute_dtype", choices=get_args(ComputeDtype), remedy="write bf16")
        one_of(self, "storage_dtype", choices=get_args(StorageDtype), remedy="write uint8")
        number_from_zero(self, "outlier_threshold", remedy="write for example 6.0")
        instances(self, "skip", kind=str, remedy="write names such as [lm_head]")

    def resolved(self, method: Method) -> WeightFormat:
        """The format of the frozen weights under a method of tuning."""
        if self.format == "auto":
            return "nf4" if method == "qlora" else "none"
        return self.format

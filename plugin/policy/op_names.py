"""Names that people give to ops, and the aten ops they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass

OP_GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": (
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv"),
        *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_mm", "aten::_int_mm"),
        *("aten::_scaled_mm_v2", "aten::linear", "aten::mkldnn_linear"),
        "transformers::grouped_mm_fallback",
    ),
    "attention": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        *("aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
        *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
        *("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"),
        *("torch_attn::_varlen_attn", "higher_order::flex_attention"),
    ),
    "convolution": ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution"),
    "communication": (
        *("_c10d_functional::all_reduce", "_c10d_functional::all_gather_into_tensor"),
        *("_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single"),
        *("_c10d_functional::wait_tensor", "_c10d_functional::broadcast"),
    ),
    "topk": ("aten::topk", "aten::sort"),
    "softmax": ("aten::_softmax", "aten::_log_softmax"),
    "norm": (
        *("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"),
        *("aten::_fused_rms_norm", "aten::rsqrt"),
    ),
    "gelu": ("aten::gelu",),
    "silu": ("aten::silu",),
    "relu": ("aten::relu",),
    "dropout": ("aten::native_dropout", "aten::bernoulli"),
    "embedding": ("aten::embedding",),
    "add": ("aten::add",),
    "mul": ("aten::mul",),
    "cat": ("aten::cat",),
}
"""Ops by short name; `rms_norm` of a model written by hand is found by its `rsqrt`."""

DEFAULT_SAVED = ("matmul", "attention", "convolution", "communication", "topk")
"""What `selective` keeps unless told otherwise: what is expensive to compute again."""

_NAME = re.compile(r"(?P<name>[\w.:]+?)(\[(?P<occurrence>\d+)\])?")


@dataclass(frozen=True, kw_only=True)
class OpName:
    """Ops that the user named, or one occurrence of them."""

    written: str
    """As the user wrote it: `matmul`, `aten::mm`, `aten.mm`, `matmul[3]`."""

    ops: frozenset[str]
    """Qualified names, such as `aten::mm`."""

    occurrence: int | None
    """Which occurrence in a unit's forward is meant, counted from 0; None for every one."""


def parse_op_name(written: str) -> OpName:
    """Reads a short name, an aten name or one occurrence of either.

    Raises:
        ValueError: If it is neither a short name nor a qualified name.
    """
    match = _NAME.fullmatch(written)
    name = match["name"] if match else ""
    ops = OP_GROUPS.get(name)
    if ops is None and "::" in name:
        ops = (name,)
    elif ops is None and name.count(".") in (1, 2):
        namespace, op = name.split(".")[:2]  # aten.mm and aten.mm.default are the same op
        ops = (f"{namespace}::{op}",)
    if match is None or ops is None:
        raise ValueError(
            f"unknown op {written!r}: expected one of {', '.join(OP_GROUPS)}, a qualified name "
            "such as aten::mm, or one occurrence of either such as matmul[3]."
        )
    occurrence = match["occurrence"]
    return OpName(
        written=written,
        ops=frozenset(ops),
        occurrence=None if occurrence is None else int(occurrence),
    )

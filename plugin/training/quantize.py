"""Holds the frozen linear layers of a model in 4 or 8 bits, by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from rematic.recipes import QuantizationConfig
from rematic.recipes.cross_checks import FOUR_BIT
from rematic.recipes.tuning_schema import WeightFormat
from rematic.training.extras import import_extra
from rematic.training.model import DTYPES

EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of fused experts, (experts, rows, columns) each, which are no linear layers."""

PACKED = ("Params4bit", "Int8Params")
"""Types of weights in 4 and 8 bits, by name: bitsandbytes need not be there."""
_SCALES_BLOCK = 64
_SECOND_BLOCK = 256


def quantize_model(
    model: nn.Module, quantization: QuantizationConfig, weight_format: WeightFormat
) -> None:
    """Replaces linear layers but the head by quantized ones, and packs fused experts.

    Weights are freed one by one. The model is marked as transformers marks one that it has loaded
    quantized, which is what PEFT looks at.

    Args:
        model: A model of transformers, on a CPU or a GPU.
        quantization: How they are held.
        weight_format: The same in a word; not `none`.

    Raises:
        ValueError: bitsandbytes is missing, or a name to skip fits no layer.
    """
    bitsandbytes = _bitsandbytes(weight_format)
    for name, linear in list(linears_to_quantize(model, quantization)):
        model.set_submodule(name, _quantized(bitsandbytes, linear, quantization, weight_format))
    quantize_experts(model, quantization, weight_format)
    # (transformers' own attributes)
    marked: Any = model
    marked.is_loaded_in_4bit = weight_format in FOUR_BIT
    marked.is_loaded_in_8bit = weight_format == "int8"
    marked.is_quantized = True
    marked.quantization_method = "bitsandbytes"


def quantize_experts(
    model: nn.Module, quantization: QuantizationConfig, weight_format: WeightFormat
) -> None:
    """Packs the fused experts of a mixture in 4 bits; they are unpacked whenever they are read.

    Raises:
        ValueError: As `check_experts`.
    """
    check_experts(model, weight_format)
    experts = list(fused_experts(model))
    if not experts:
        return
    parametrize = import_extra(
        "bitsandbytes.nn.parametrize", extra="bitsandbytes", needed_by="quantization of experts"
    )
    for module, name in experts:
        parametrize.replace_parameter_4bit(
            module, name, compress_statistics=quantization.double, quant_type=weight_format
        )


def check_quantizable(
    model: nn.Module, quantization: QuantizationConfig, weight_format: WeightFormat
) -> None:
    """Refuses a model of which nothing could be held in few bits.

    Args:
        model: A model whose weights need not exist.
        quantization: How they are to be held.
        weight_format: The same in a word.

    Raises:
        ValueError: As `linears_to_quantize` and `check_experts`, or there is no such layer.
    """
    check_experts(model, weight_format)
    some = any(True for _ in linears_to_quantize(model, quantization))
    if not (some or any(True for _ in fused_experts(model))):
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"quantization.format is {weight_format!r}, but a model of type {kind!r} has no linear "
            "layers besides its head that could be held so (or quantization.skip names all of "
            "them); write tuning.method: lora and quantization.format: none"
        )


def check_experts(model: nn.Module, weight_format: WeightFormat) -> None:
    """Refuses fused experts in 8 bits, in which bitsandbytes cannot hold them.

    Raises:
        ValueError: There are some.
    """
    if weight_format not in FOUR_BIT and any(True for _ in fused_experts(model)):
        raise ValueError(
            f"quantization.format is {weight_format!r}, but the experts of this model are fused "
            "into tensors that bitsandbytes holds in 4 bits only; write tuning.method: qlora"
        )


def fused_experts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and parameter names of the fused experts of a mixture, packed or not."""
    for module in model.modules():
        for name in EXPERTS:
            parameter = module._parameters.get(name)
            is_fused = parameter is not None and parameter.ndim == 3
            if is_fused or is_parametrized(module, name):
                yield module, name


def linears_to_quantize(
    model: nn.Module, quantization: QuantizationConfig
) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that are held in fewer bits.

    Raises:
        ValueError: A name to skip fits no layer.
    """
    kept = _names_kept(model)
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]
    for skipped in quantization.skip:
        if not any(_is_named(name, skipped) for name, _ in linears):
            raise ValueError(
                f"quantization.skip names {skipped!r}, but no linear layer of this model is called "
                f"so; expected the end of a name such as {linears[0][0] if linears else 'lm_head'}"
            )
    for name, linear in linears:
        skips = (*kept, *quantization.skip)
        if not any(_is_named(name, skip) for skip in skips):
            yield name, linear


def load_options(
    empty: nn.Module, quantization: QuantizationConfig, weight_format: WeightFormat
) -> dict[str, Any]:
    """What `from_pretrained` is told, so that it quantizes weight by weight while it loads.

    Args:
        empty: The same model without weights, which tells the name of the head.
        quantization: How linear layers are held.
        weight_format: The same in a word.
    """
    _bitsandbytes(weight_format)
    import_extra("accelerate", extra="bitsandbytes", needed_by="loading quantized weights")
    import transformers

    config: Any = transformers.BitsAndBytesConfig  # untyped
    # (where it is given names, transformers adds none)
    names = [*_names_kept(empty), *quantization.skip]
    options: dict[str, Any] = {"llm_int8_skip_modules": names}
    if weight_format == "int8":
        options |= {
            "load_in_8bit": True,
            "llm_int8_threshold": quantization.outlier_threshold,
        }
    else:
        options |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": weight_format,
            "bnb_4bit_use_double_quant": quantization.double,
            "bnb_4bit_compute_dtype": DTYPES[quantization.compute_dtype],
            "bnb_4bit_quant_storage": DTYPES[quantization.storage_dtype],
        }
    # by itself transformers would load onto the GPU that is current, the first one in every rank
    return {"quantization_config": config(**options), "device_map": {"": "cpu"}}


def keep_layout(model: nn.Module) -> None:
    """Lets evaluation on a CPU leave packed weights as training left them.

    Where a CPU has certain instructions, a 4-bit layer of bitsandbytes 0.50 packs its weights anew
    in its first forward in evaluation mode, and training goes on with those.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            untyped: Any = module
            untyped.support_avx512bf16_for_cpu = False


def held_bytes(num_elements: int, quantization: QuantizationConfig, form: WeightFormat) -> int:
    """Bytes of one quantized weight with its scales.

    In 4 bits a scale in 32 bits for each block of 64; quantized themselves (Dettmers et al. 2023,
    section 3), they take 8 bits, and 32 bits for each block of 256 of them and once for all.
    In 8 bits one scale a row, which is left out.
    """
    if form == "int8":
        return num_elements
    blocks = -(-num_elements // _SCALES_BLOCK)
    scales = blocks + 4 * -(-blocks // _SECOND_BLOCK) + 4 if quantization.double else 4 * blocks
    return -(-num_elements // 2) + scales


def _quantized(
    bitsandbytes: Any,  # noqa: ANN401 - a module
    linear: nn.Linear,
    quantization: QuantizationConfig,
    weight_format: WeightFormat,
) -> nn.Module:
    weight, device = linear.weight.detach(), linear.weight.device
    size = (linear.in_features, linear.out_features)
    has_bias = linear.bias is not None
    made: nn.Module
    if weight_format == "int8":
        made = bitsandbytes.nn.Linear8bitLt(
            *size,
            bias=has_bias,
            has_fp16_weights=False,
            threshold=quantization.outlier_threshold,
            device="meta",
        )
        made.weight = bitsandbytes.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False
        )
    else:
        made = bitsandbytes.nn.Linear4bit(
            *size,
            bias=has_bias,
            compute_dtype=DTYPES[quantization.compute_dtype],
            compress_statistics=quantization.double,
            quant_type=weight_format,
            quant_storage=DTYPES[quantization.storage_dtype],
            device="meta",
        )
        made.weight = bitsandbytes.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=quantization.double,
            quant_type=weight_format,
            quant_storage=DTYPES[quantization.storage_dtype],
            module=made,
        )
    if has_bias:
        made.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    linear.weight = None  # type: ignore[assignment] # frees it before the next one is packed
    return made.to(device)


def _names_kept(model: nn.Module) -> list[str]:
    """Names of the head, of tied weights and of the last layer, as transformers keeps them."""
    from transformers.quantizers.base import get_keys_to_not_convert

    return [str(name) for name in get_keys_to_not_convert(model)]


def _is_named(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _bitsandbytes(weight_format: WeightFormat) -> Any:  # noqa: ANN401 - a module
    return import_extra(
        "bitsandbytes", extra="bitsandbytes", needed_by=f"quantization.format: {weight_format}"
    )


def unpack_model(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Turns what `quantize_model` did back, as far as rounding lets it.

    Args:
        model: A quantized model without an adapter.
        dtype: Of the linear layers afterwards.
    """
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    for name, layer in list(model.named_modules()):
        packed: Any = layer
        if type(getattr(layer, "weight", None)).__name__ in PACKED:
            weight = dequantize_bnb_weight(packed.weight, getattr(packed, "state", None))
            linear = nn.Linear(
                packed.in_features, packed.out_features, packed.bias is not None, device="meta"
            )
            linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            if packed.bias is not None:
                linear.bias = nn.Parameter(packed.bias.detach().to(dtype), requires_grad=False)
            model.set_submodule(name, linear)
        for key in EXPERTS:
            if is_parametrized(layer, key):
                value = getattr(layer, key).detach().to(dtype)
                remove_parametrizations(layer, key, leave_parametrized=False)
                setattr(layer, key, nn.Parameter(value, requires_grad=False))
    marked: Any = model
    marked.is_loaded_in_4bit = marked.is_loaded_in_8bit = marked.is_quantized = False
    for attribute in ("quantization_method", "hf_quantizer"):
        if hasattr(marked, attribute):
            delattr(marked, attribute)
    if getattr(marked.config, "quantization_config", None) is not None:
        del marked.config.quantization_config

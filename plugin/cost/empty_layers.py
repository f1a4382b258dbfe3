"""Quantized layers without weights: what bitsandbytes makes of a model on the device `meta`.

Its layers (0.50) quantize when they move to a device, which a model without weights never does.
Here they are told to; their functions know the shapes of what they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rematic.cost.later_compile import compiled_when_called
from rematic.quiet_import import import_quietly
from rematic.recipes import QuantizationConfig
from rematic.recipes.tuning_schema import WeightFormat
from rematic.training.quantize import quantize_model

_META = torch.device("meta")


def quantize_empty(
    model: nn.Module, quantization: QuantizationConfig, weight_format: WeightFormat
) -> None:
    """Does to a model on `meta` what `quantize_model` does to one with weights.

    Args:
        model: A model of transformers.
        quantization: How weights are held.
        weight_format: The same in a word; not `none`.

    Raises:
        ValueError: As `quantize_model`.
    """
    with contextlib.suppress(ImportError), compiled_when_called():
        import_quietly("bitsandbytes")  # where it is missing, the next line says so
    with _maps_put_back():
        quantize_model(model, quantization, weight_format)
        for module in model.modules():
            layer: Any = module  # of bitsandbytes
            weight = module._parameters.get("weight")
            kind = type(weight).__name__
            if kind == "Params4bit" and not layer.weight.bnb_quantized:
                layer.weight = layer.weight._quantize(_META)
            elif kind == "Int8Params":
                _fill_8bit(layer)


@contextlib.contextmanager
def _maps_put_back() -> Iterator[None]:
    """Leaves no tensor without values among the tables that bitsandbytes makes once and keeps."""
    tables: dict[str, torch.Tensor] = getattr(_functional(), "name2qmap", {})
    before = dict(tables)
    try:
        yield
    finally:
        tables.clear()
        tables.update(before)


def _functional() -> Any:  # noqa: ANN401 - a module of bitsandbytes
    import bitsandbytes.functional

    return bitsandbytes.functional


def _fill_8bit(layer: Any) -> None:  # noqa: ANN401 - a layer of bitsandbytes
    """A byte for each weight, and a scale for each row (`Int8Params`)."""
    codes = torch.empty(layer.weight.shape, dtype=torch.int8, device=_META)
    layer.weight.data, layer.weight.CB, layer.weight.SCB = codes, None, None
    layer.state.CB = layer.weight.data
    layer.state.SCB = torch.empty(len(codes), dtype=torch.float32, device=_META)
    # Which columns of activations are outliers depends on values, which a trace has not.
    layer.state.threshold = 0.0

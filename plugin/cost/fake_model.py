"""A copy of a model without weights: fake tensors, and only the units that have to be traced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rematic.cost.real_twins import RealTwins


def fake_copy(model: nn.Module, twins: RealTwins) -> nn.Module:
    """Returns a copy whose tensors are fake ones on the CPU; no weight is read or allocated.

    Of an attached model the copy is plain.

    Args:
        model: The model, on any device, `meta` included.
        twins: Makes the fake tensors.
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if id(tensor) not in memo:
            fake = twins.fake(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
            _copy_quantization(tensor, fake, twins, memo)
    for module in model.modules():  # of fused experts, whose weights are unpacked when read
        for scale in quantization_tensors(module):
            if id(scale) not in memo:
                memo[id(scale)] = twins.fake(scale)
        _share_codes(module, memo)
    originals = list(memo)  # deepcopy adds to the memo, and keeps alive what it copied
    copied: nn.Module = copy.deepcopy(model, memo)
    del originals
    return copied


def _copy_quantization(
    tensor: torch.Tensor, fake: torch.Tensor, twins: RealTwins, memo: dict[int, Any]
) -> None:
    """Gives the fake of a 4-bit weight of bitsandbytes (0.50) what its layer reads from it."""
    if type(tensor).__name__ == "Int8Params":  # its codes and scales are in its layer by now
        fake.CB = fake.SCB = None  # type: ignore[attr-defined] # as there
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        for scale in quantization_tensors(tensor):
            memo[id(scale)] = twins.fake(scale)
        fake.quant_state = copy.deepcopy(state, memo)  # type: ignore[attr-defined] # as there


def _share_codes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Lets the state of an 8-bit layer of bitsandbytes (0.50) hold the fake of its weight."""
    codes = getattr(getattr(module, "state", None), "CB", None)
    weight = module._parameters.get("weight")
    if isinstance(codes, torch.Tensor) and weight is not None and id(codes) not in memo:
        memo[id(codes)] = memo[id(weight)].detach()


def quantization_tensors(holder: torch.Tensor | nn.Module) -> list[torch.Tensor]:
    """Returns what a quantized weight, or its layer, holds beside its bytes: scales and codes."""
    state = getattr(holder, "quant_state", None)
    nested = getattr(state, "state2", None)
    values = [*vars(state).values()] if state is not None else []
    values += [*vars(nested).values()] if nested is not None else []
    values.append(getattr(getattr(holder, "state", None), "SCB", None))
    return [value for value in values if isinstance(value, torch.Tensor)]


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns what all quantized weights of a model hold beside their bytes, each once."""
    holders: list[torch.Tensor | nn.Module] = [*model.parameters(), *model.modules()]
    found = [scale for holder in holders for scale in quantization_tensors(holder)]
    return list({id(scale): scale for scale in found}.values())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        yield from (b for b in module._buffers.values() if b is not None)
        # what a module keeps beside its buffers, such as the first frequencies of rotary positions
        yield from (v for v in vars(module).values() if isinstance(v, torch.Tensor))


def shorten(model: nn.Module, unit_names: Sequence[str], kept: Sequence[int]) -> None:
    """Takes all units but those at the positions `kept` out of their stacks, in place.

    The configs that the modules hold are told: the number of layers, and lists with an entry for
    each layer.

    Args:
        model: A copy that may be changed.
        unit_names: Qualified names of all units, in order.
        kept: Positions of those that stay.
    """
    modules = dict(model.named_modules())
    by_stack: dict[str, list[int]] = {}
    for position, name in enumerate(unit_names):
        by_stack.setdefault(name.rpartition(".")[0], []).append(position)
    for stack, positions in by_stack.items():
        container = modules[stack]
        staying = [i for i, position in enumerate(positions) if position in kept]
        if len(staying) == len(positions) or not isinstance(
            container, (nn.ModuleList, nn.Sequential)
        ):
            continue
        leaving = {unit_names[p].rpartition(".")[2] for p in positions if p not in kept}
        remaining = [child for key, child in container._modules.items() if key not in leaving]
        container._modules = {str(i): child for i, child in enumerate(remaining)}
        for config in _configs(model):
            _shorten_config(config, num_before=len(positions), staying=staying)


def _configs(model: nn.Module) -> list[object]:
    found = [getattr(module, "config", None) for module in model.modules()]
    found += [getattr(c, "text_config", None) for c in found if c is not None]
    return list({id(config): config for config in found if hasattr(config, "__dict__")}.values())


def _shorten_config(config: object, *, num_before: int, staying: Sequence[int]) -> None:
    values = vars(config)
    for name, value in list(values.items()):
        if isinstance(value, (list, tuple)) and len(value) == num_before:
            values[name] = type(value)(value[i] for i in staying)
        elif type(value) is int and value == num_before and "layer" in name:
            values[name] = len(staying)

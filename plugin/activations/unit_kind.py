"""What units must have in common for the safety check of one to speak for the other."""

from __future__ import annotations

import re
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from rematic.activations.kept_values import is_plain_object
from rematic.activations.module_walk import OF_EVERY_MODULE
from rematic.activations.torch_private import COMPILED_CALL
from rematic.activations.wrappers import unwrapped

_POSITION = re.compile(r"idx|index|(layer|block)_?(id|no|num|number|depth)$")
"""Names of attributes that count the units of a stack, which would make each a kind of its own."""
_BY_REMATIC = frozenset({"forward", COMPILED_CALL})
_MAX_DEPTH = 2


def kind_of(module: nn.Module, *, num_hooks: int) -> Hashable:
    """Returns what is equal for two units of one class, configuration and set of frozen parameters.

    Computed for the calls that are checked, not for every one.

    Args:
        module: The unit.
        num_hooks: How many hooks inside of it only look on.
    """
    return num_hooks, tuple(_parts_of(unwrapped(module)))


def _parts_of(module: nn.Module) -> Iterator[Hashable]:
    for path, part in module.named_modules():
        kind = type(part)  # not itself: torch's parametrizations make one for each module
        yield path, kind.__qualname__, kind.forward, part.__dict__.get("training")
        for name, value in part.__dict__.items():
            is_own = name not in OF_EVERY_MODULE and name not in _BY_REMATIC
            if is_own and not (type(value) is int and _POSITION.search(name)):
                yield name, _configuration(value, depth=0)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield name, parameter.requires_grad, parameter.dtype


def _configuration(value: Any, *, depth: int) -> Hashable:
    """Returns what decides how code runs: values where they are few, types elsewhere."""
    kind: Any = type(value)
    if kind in (bool, int, str, type(None)):
        return kind, value
    if kind is float:  # a chance that grows from layer to layer is one way to run, 0 is another
        chance: float = value
        return chance if chance in (0.0, 1.0) else "some number"
    if isinstance(value, types.FunctionType):
        return value.__code__
    if depth < _MAX_DEPTH:
        if kind in (list, tuple):
            return kind, tuple(_configuration(item, depth=depth + 1) for item in value)
        if is_plain_object(value):
            value = vars(value)
        if isinstance(value, Mapping):
            items = ((str(k), _configuration(v, depth=depth + 1)) for k, v in value.items())
            return kind, tuple(items)
    code: Hashable = kind
    return code

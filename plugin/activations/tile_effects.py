"""What a call does beside its values that slices of it would do in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rematic.activations import torch_private
from rematic.activations.kept_values import CONTAINERS, PLAIN, is_plain_object, same_contents
from rematic.activations.module_state import ModuleState
from rematic.activations.module_walk import OF_EVERY_MODULE
from rematic.activations.nested import Nested, map_leaves

_COMPARED_BY_CONTENTS = CONTAINERS | PLAIN


class EffectsOfCall:
    """Tells what a forward has changed on its modules.

    Args:
        state: What the modules hold, made before; shown to them now.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._before = [(part, dict(part.__dict__)) for part, _ in state.attributes]

    def change(self) -> str | None:
        """Describes the first thing that has changed, None if nothing has."""
        return self._changed_buffer() or self._changed_value() or self._changed_attribute()

    def _changed_buffer(self) -> str | None:
        for tensor in self._state.tensor_states:
            now = tensor.home.get(tensor.name)
            if tensor.clone is None:
                changed = now is not None
            else:
                changed = now is None or not same_contents(tensor.clone, now.detach())
            if changed:
                return f"its buffer {tensor.full_name!r}"
        return None

    def _changed_value(self) -> str | None:
        for module, values in self._state.attributes:
            for name, value in values.items():
                now = module.__dict__.get(name, values)
                if now is not value and (type(now) is not type(value) or now != value):
                    return f"its attribute {name!r}"
        for container in self._state.containers:
            if not same_contents(container.contents, container.home.get(container.name)):
                return f"its attribute {container.name!r}"
        for held in self._state.objects:
            if held.is_changed():
                return f"its attribute {held.full_name!r}"
        return None

    def _changed_attribute(self) -> str | None:
        """Describes an attribute that is new or gone, or another tensor or function than before."""
        for part, before in self._before:
            now = part.__dict__
            for name in before.keys() ^ now.keys():
                return f"its attribute {name!r}"
            for name in now.keys() - OF_EVERY_MODULE:
                value = now[name]
                is_seen_to = type(value) in _COMPARED_BY_CONTENTS or is_plain_object(value)
                if value is not before[name] and not is_seen_to:
                    return f"its attribute {name!r}"
        return None


def differing_rest(output: Nested, sliced: Nested) -> bool:
    """Returns whether two outputs differ in what is no tensor."""

    def without_tensors(value: Any) -> Any:
        return map_leaves(lambda _: None, value)

    return bool(without_tensors(output) != without_tensors(sliced))


def shared_memory(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Returns whether an output has elements in common with another one, or memory with `others`.

    Pieces of one result (`chunk`) share its memory and no element.
    """
    foreign = {torch_private.storage_key(tensor) for tensor in others} - {None}
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in outputs:
        key = torch_private.storage_key(tensor)
        if key is not None:
            by_storage.setdefault(key, []).append(tensor)
    if by_storage.keys() & foreign:
        return True
    return any(len(tensors) > 1 and _overlap(tensors) for tensors in by_storage.values())


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    if len({tensor.dtype for tensor in tensors}) > 1:
        return True
    seen: set[int] = set()
    for tensor in tensors:
        numbers = torch.arange(tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
        own = numbers.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        places = set(own.flatten().tolist())
        if seen & places:
            return True
        seen |= places
    return False

"""Lists, dictionaries and the like that are attributes of modules, as a forward saw them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from rematic.activations.kept_values import (
    CLONED_BUFFER_BYTES,
    copied,
    put_values_back,
    version_of,
)

FEW = 16
"""So many small tensors of a container are copied before every call, more where they change."""


@dataclass(slots=True)
class ContainerState:
    """One attribute that is a list, dictionary, tuple or the like, as forward saw it.

    A copy alone: the container may come to hold an output of the unit, and with it its graph.
    """

    home: dict[str, Any]
    name: str
    full_name: str
    contents: Any
    tensors: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]]
    """The tensors in it that need no gradient, by identity: in-place counter, and a copy where
    forward is known to change them."""

    @classmethod
    def read(
        cls, home: dict[str, Any], name: str, full_name: str, *, clones: bool
    ) -> ContainerState:
        """Reads the container called `name`."""
        found: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                is_small = tensor.numel() * tensor.element_size() <= CLONED_BUFFER_BYTES
                copies = clones or (is_small and len(found) < FEW)
                clone = tensor.clone() if copies else None
                found[id(tensor)] = tensor, version_of(tensor), clone
            return tensor

        return cls(home, name, full_name, copied(home[name], leaf=note), found)

    def changed(self) -> bool:
        """Returns whether a tensor in it was changed in place."""
        return any(version_of(tensor) != version for tensor, version, _ in self.tensors.values())

    def shown(self) -> Any:
        """Returns what a replay is shown."""

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            clone = self.tensors.get(id(tensor), (None, 0, None))[2]
            return tensor if clone is None else clone.clone()

        return copied(self.contents, leaf=leaf)

    def restore(self) -> None:
        """Puts back what it held, and what the tensors in it held."""
        _refill(self)
        for tensor, _, clone in self.tensors.values():
            if clone is not None:
                put_values_back(tensor, clone)


def _refill(kept: ContainerState) -> None:
    # Any: one of the types of CONTAINERS, the same as that of the copy
    container: Any = kept.home.get(kept.name)
    if type(container) is not type(kept.contents) or isinstance(container, tuple):
        kept.home[kept.name] = copied(kept.contents)
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(kept.contents)
    else:
        container.update(kept.contents)

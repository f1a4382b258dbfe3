"""The handle that all stashes give out: a view of a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from rematic.stash.layout import Span, View


class Block(Protocol):
    """The bytes of one span, wherever they are; freed when the handles that share it die."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the span."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes that the stash holds for it."""
        ...

    def load(self) -> torch.UntypedStorage:
        """Returns a storage with the bytes of the span, the same one while that is alive."""
        ...


class StoredTensor:
    """A tensor that was put away."""

    __slots__ = ("__weakref__", "block", "view")

    def __init__(self, block: Block, view: View) -> None:
        self.block = block
        self.view = view

    @property
    def nbytes(self) -> int:
        """Bytes that come into memory with it."""
        return self.block.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that the stash holds for it."""
        return self.block.stored_bytes

    def get(self) -> torch.Tensor:
        """Returns the tensor."""
        return self.view.over(self.block.load())


def give_out(num_tensors: int, stored: Iterable[tuple[Span, Block]]) -> list[StoredTensor | None]:
    """Returns a handle for every tensor that lies in a stored span, None for the others."""
    handles: list[StoredTensor | None] = [None] * num_tensors
    for span, block in stored:
        for position, view in zip(span.positions, span.views, strict=True):
            handles[position] = StoredTensor(block, view)
    return handles


def not_loaded() -> None:
    """Stands for the weak reference to a storage that is not loaded."""

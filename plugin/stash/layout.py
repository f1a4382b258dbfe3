"""Which bytes of which storages some tensors need, and how they lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 256
"""Offsets keep their remainder by this, so that kernels which look at alignment run alike."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How one tensor lies in the bytes of a span."""

    shape: torch.Size
    """Sizes, in elements."""
    stride: tuple[int, ...]
    """Steps, in elements."""
    dtype: torch.dtype
    """Type of the elements."""
    offset: int
    """Place of the first element, in elements from the start of the span."""
    conjugate: bool
    """Whether the elements are read as complex conjugates."""

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor, as a view of a storage that holds the bytes of the span."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.shape, self.stride)
        return tensor.conj() if self.conjugate else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The smallest range of one storage in which some tensors lie."""

    storage: torch.UntypedStorage
    """The storage, alive as long as this is."""
    start_bytes: int
    """First byte needed, rounded down to `ALIGNMENT_BYTES`."""
    num_bytes: int
    """Bytes from there to the last one needed."""
    positions: tuple[int, ...]
    """Which of the tensors lie in it, by their place in the list."""
    views: tuple[View, ...]
    """How they lie, in that order."""

    @property
    def device(self) -> torch.device:
        """Where the storage is."""
        return self.storage.device

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns its bytes as a flat tensor, an alias."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        start, count = self.start_bytes // dtype.itemsize, self.num_bytes // dtype.itemsize
        return empty.set_(self.storage, start, (count,), (1,))


def refusal(tensor: torch.Tensor, *, min_bytes: int = 0) -> str | None:
    """Returns why no stash takes a tensor, None if its layout is no obstacle.

    Args:
        tensor: Any tensor.
        min_bytes: Size that its storage must have; by the storage, as a small view holds all of it.
    """
    if type(tensor) not in _PLAIN:
        return f"it is a {type(tensor).__name__}, whose inner tensors are not seen"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}: expected torch.strided"
    if tensor.is_quantized or tensor.device.type == "meta":
        return "it is quantized" if tensor.is_quantized else "it is on the device meta"
    if tensor.is_neg():
        return "its elements are read negated (a view of a conjugate)"
    try:
        size_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return "it has no storage"
    if size_bytes < _end(tensor) * tensor.dtype.itemsize:
        return f"its storage was freed ({size_bytes} bytes are left)"
    if size_bytes < min_bytes:
        return f"its storage has {size_bytes} bytes, fewer than {min_bytes}"
    return None


def spans_of(
    tensors: Sequence[torch.Tensor], *, min_bytes: int, by_dtype: bool = False
) -> list[Span]:
    """Groups tensors by storage, leaving out those that are refused.

    Args:
        tensors: What is to be put away.
        min_bytes: Size that a storage must have.
        by_dtype: Whether views of one storage that differ in dtype go into spans of their own.
    """
    groups: dict[tuple[int, torch.dtype | None], list[int]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for position, tensor in enumerate(tensors):
        if refusal(tensor, min_bytes=min_bytes) is None:
            storage = tensor.untyped_storage()
            # Torch has one Python object for a storage, and this dict keeps it.
            storages[id(storage)] = storage
            key = (id(storage), tensor.dtype if by_dtype else None)
            groups.setdefault(key, []).append(position)
    return [_span(storages[key], tensors, group) for (key, _), group in groups.items()]


def _span(
    storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor], positions: list[int]
) -> Span:
    members = [tensors[position] for position in positions]
    sizes = [(tensor, tensor.dtype.itemsize) for tensor in members if tensor.numel() > 0]
    start = min((_start(tensor) * size for tensor, size in sizes), default=0)
    end = max((_end(tensor) * size for tensor, size in sizes), default=0)
    start -= start % ALIGNMENT_BYTES
    return Span(
        storage=storage,
        start_bytes=start,
        num_bytes=end - start,
        positions=tuple(positions),
        views=tuple(_view(tensor, start) for tensor in members),
    )


def _view(tensor: torch.Tensor, start_bytes: int) -> View:
    offset = _start(tensor) - start_bytes // tensor.dtype.itemsize
    return View(
        shape=tensor.shape,
        stride=tensor.stride(),
        dtype=tensor.dtype,
        offset=offset if tensor.numel() > 0 else 0,
        conjugate=tensor.is_conj(),
    )


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())  # torch types it as if it might be symbolic


def _end(tensor: torch.Tensor) -> int:
    """Returns the place after the last element, in elements from the start of the storage."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return _start(tensor) + 1 + sum((size - 1) * stride for size, stride in steps)

"""Counts the bytes of live storages, each once, and sees at once when one is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

_FLATTEN = "__tensor_flatten__"  # torch's protocol of wrapper subclasses
_NO_STORAGE = (NotImplementedError, RuntimeError)  # sparse tensors; fakes of other backends


class LiveStorages:
    """The storages that were noted and are still alive.

    A storage is known by its Python object. Torch keeps that one object while the storage lives,
    also when only a graph or a view in C++ holds it, so its address cannot be mistaken for that of
    a later storage. Only weak references are held.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Current: bytes of the storages that are alive."""
        self._references: dict[int, _Reference] = {}
        # Through a weak reference, as a strong one would close a cycle with `_references`.
        ledger = weakref.ref(self)

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self_ = ledger()
            if self_ is not None:
                self_._forget(reference)

        self._on_death = forget

    def __len__(self) -> int:
        return len(self._references)

    def note(self, storage: torch.UntypedStorage) -> int | None:
        """Counts a storage; returns its bytes if it is new and None if it is known.

        A known storage that was resized since is counted with its new size.
        """
        size_bytes = storage.nbytes()
        known = self._references.get(id(storage))
        if known is None:
            reference = _Reference(storage, self._on_death)
            reference.key, reference.num_bytes = id(storage), size_bytes
            self._references[reference.key] = reference
            self.num_bytes += size_bytes
            return size_bytes
        self.num_bytes += size_bytes - known.num_bytes
        known.num_bytes = size_bytes
        return None

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the storage is counted."""
        return id(storage) in self._references

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        del self._references[reference.key]
        self.num_bytes -= reference.num_bytes


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows what has to be taken back when it dies."""

    __slots__ = ("key", "num_bytes")

    key: int
    num_bytes: int


def storages_of(value: object) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of the tensors in what an op takes or returns.

    Of a wrapper (such as `DTensor`) it yields those of the tensors inside. Sparse tensors and
    others without a storage have none.
    """
    if isinstance(value, torch.Tensor):
        flatten = None if type(value) is torch.Tensor else getattr(value, _FLATTEN, None)
        if flatten is None:
            yield from _own_storage(value)
        else:
            names, _ = flatten()
            yield from storages_of([getattr(value, name) for name in names])
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from storages_of(element)
    elif isinstance(value, dict):
        yield from storages_of(list(value.values()))


def _own_storage(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    try:
        storage = tensor.untyped_storage()
    except _NO_STORAGE:
        return
    yield storage

"""Stands for the place that tensors move to, while a step is traced on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from rematic.cost.torch_private import (
    FakeTensor,
    disable_current_modes,
    unset_fake_temporarily,
)
from rematic.memory.storages import storages_of
from rematic.policy import Action, Compress, Offload, RecomputeOffload
from rematic.stash import Handle
from rematic.stash.stash import MIN_BYTES

TYPICAL_TOKENS = 2048
"""Batch size x length at which it is decided which tensors are large enough to move."""

_BLOCK_ELEMENTS = 256
_SCALE_BYTES = 4
_HALF_OR_FULL = (torch.float32, torch.float16, torch.bfloat16)


class Offered(NamedTuple):
    """A storage that a unit offered to move."""

    key: int
    """Which one, among all that were ever offered."""

    num_bytes: int
    """Its size."""

    is_taken: bool
    """Whether it was moved."""


class TracedPlaces:
    """The places of a traced model; `offered` tells what `offload` was given.

    Args:
        takes_memory: Whether what comes back takes memory; what is mapped from a file does not.
    """

    def __init__(self, *, takes_memory: bool) -> None:
        self.takes_memory = takes_memory
        self.offered: list[Offered] = []
        """Storages since the last reset."""
        self.min_bytes = MIN_BYTES
        """Size from which a storage is moved."""
        self._num_offered = 0
        self.on_return_death: Callable[[int], None] | None = None
        """Is told the key of each storage that came back, when it dies."""

    def set_tokens(self, tokens: int) -> None:
        """Chooses what moves in a step of so many tokens.

        What moves at `TYPICAL_TOKENS` moves in a small step as well: otherwise nothing would, and
        the bytes at other lengths could not be told from it.
        """
        self.min_bytes = min(MIN_BYTES, MIN_BYTES * tokens // TYPICAL_TOKENS)

    def note(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Takes down what a unit offers; returns the key of each storage by its `id`.

        (The `id` itself is given to another storage once this one has moved.)
        """
        keys: dict[int, int] = {}
        for storage in storages_of(tuple(tensors)):
            if id(storage) not in keys:
                keys[id(storage)] = key = self._num_offered
                self._num_offered += 1
                size = storage.nbytes()
                self.offered.append(Offered(key, size, size >= self.min_bytes))
        return keys

    def note_return_death(self, key: int) -> None:
        """Takes note that a storage which had come back is gone."""
        if self.on_return_death is not None:
            self.on_return_death(key)

    def of(self, action: Action) -> TracedStash | None:
        """Returns where `action` moves tensors, None if it moves none."""
        if isinstance(action, Compress):
            return TracedStash(self, compresses=True)
        if isinstance(action, (Offload, RecomputeOffload)):
            return TracedStash(self, compresses=False)
        return None


class TracedStash:
    """Takes fake tensors and gives back new ones that look like them."""

    def __init__(self, places: TracedPlaces, *, compresses: bool) -> None:
        self.name = "compress" if compresses else "traced"
        self.lossy = compresses
        self._places = places

    @property
    def used_bytes(self) -> int:
        """Nothing: the bytes of fake tensors are nowhere."""
        return 0

    def put(self, tensors: Sequence[torch.Tensor]) -> list[Handle | None]:
        """Takes what the real stash would take; tensors that share a storage share a block."""
        keys = {} if self.lossy else self._places.note(tensors)
        blocks: dict[int, _Block] = {}
        handles: list[Handle | None] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            assert isinstance(tensor, FakeTensor), "a traced unit saves fake tensors"
            if not self._takes(tensor):
                handles.append(None)
                continue
            if id(storage) not in blocks:
                blocks[id(storage)] = self._block(storage, tensor.dtype, keys.get(id(storage)))
            handles.append(_TracedHandle(blocks[id(storage)], tensor))
        return handles

    def _takes(self, tensor: torch.Tensor) -> bool:
        is_large = tensor.untyped_storage().nbytes() >= self._places.min_bytes
        return is_large and (not self.lossy or tensor.dtype in _HALF_OR_FULL)

    def _block(self, storage: torch.UntypedStorage, dtype: torch.dtype, key: int | None) -> _Block:
        num_bytes = storage.nbytes()
        if key is not None:
            gone = functools.partial(self._places.note_return_death, key)
            return _Block(num_bytes, None, takes_memory=self._places.takes_memory, gone=gone)
        elements = num_bytes // dtype.itemsize
        scales = -(-elements // _BLOCK_ELEMENTS) * _SCALE_BYTES
        return _Block(num_bytes, torch.empty(elements + scales, dtype=torch.uint8))

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Does nothing: what a prefetch needs is added where costs are read (`StepProfile`)."""

    def close(self) -> None:
        """Does nothing."""


class _Block:
    """The bytes of one storage, and what is held of them on the device (codes and scales)."""

    def __init__(
        self,
        num_bytes: int,
        codes: torch.Tensor | None,
        *,
        takes_memory: bool = True,
        gone: Callable[[], None] | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self._gone = gone
        self._takes_memory = takes_memory
        self._codes = codes
        self._loaded: Callable[[], torch.UntypedStorage | None] = _nothing

    def load(self) -> torch.UntypedStorage:
        """Returns a storage of the bytes: the one that is in memory, if it is."""
        storage = self._loaded()
        if storage is None:
            # out of sight of the log, which then counts nothing, where it takes no memory
            unseen = contextlib.nullcontext() if self._takes_memory else disable_current_modes()
            device = "cpu" if self._takes_memory else "meta"
            with unseen:
                base = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            storage = base.untyped_storage()
            self._loaded = weakref.ref(storage)
            if self._gone is not None:  # the block itself may be gone before what came back of it
                weakref.finalize(storage, self._gone).atexit = False
        return storage


def _nothing() -> None:
    """Stands for the weak reference to a storage that is not loaded."""


class _TracedHandle:
    """Stands for one fake tensor."""

    __slots__ = ("__weakref__", "block", "dtype", "fake_mode", "offset", "shape", "stride")

    def __init__(self, block: _Block, tensor: FakeTensor) -> None:
        self.block = block
        self.fake_mode = tensor.fake_mode
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset = tensor.storage_offset()

    @property
    def nbytes(self) -> int:
        """Bytes that come into memory with it."""
        return self.block.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that are held elsewhere."""
        return self.block.num_bytes

    def get(self) -> torch.Tensor:
        """Returns a tensor like the one that was taken."""
        storage = self.block.load()
        # `set_` on a fake tensor would keep the storage alive for good (torch 2.13).
        with unset_fake_temporarily():
            empty = torch.empty(0, dtype=self.dtype, device="meta")
            tensor = empty.set_(storage, self.offset, self.shape, self.stride)
            return FakeTensor(self.fake_mode, tensor, torch.device("cpu"))

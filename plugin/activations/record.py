"""A record: everything one call of a unit saved for backward, as holders that can be evicted.

Holders own tensors, autograd owns holders, the record knows its holders weakly. So memory falls
through backward as it does in plain autograd (contract 6), and a record whose tensors are all
consumed is gone by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rematic.activations import torch_private
from rematic.activations.ambient import capture_ambient
from rematic.activations.arguments import Argument, CallArguments
from rematic.activations.kept_values import version_of
from rematic.activations.module_state import ModuleState
from rematic.activations.observers import Observers
from rematic.activations.selective import SelectiveCache
from rematic.stash import Handle, Stash

STALE = -2
"""Version of a holder whose tensor was already changed in place when it was evicted."""


class SlotMetadata(NamedTuple):
    """What the tensor in a slot must look like when a replay makes it again.

    (A named tuple: one is made for every tensor that is not held.)
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    storage: weakref.ref[Any] | None
    """The storage it had in forward, None if it had none."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SlotMetadata:
        """Reads a tensor."""
        storage = torch_private.storage_of(tensor)
        kept = None if storage is None else weakref.ref(storage)
        return cls(tensor.shape, tensor.dtype, tensor.device, kept)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor looks like this."""
        return (
            self.shape == tensor.shape
            and self.dtype == tensor.dtype
            and self.device == tensor.device
        )

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)} on {self.device}"


class Holder:
    """Stands in autograd's graph for one saved tensor."""

    __slots__ = ("__weakref__", "external", "handle", "index", "record", "tensor", "version")

    record: Record
    index: int
    tensor: torch.Tensor | None
    handle: Handle | None
    external: bool
    version: int

    def come_back(self) -> None:
        """Takes the tensor back from where it was moved, if it was."""
        if self.handle is not None:
            self.tensor = self.handle.get()
            self.version = version_of(self.tensor)


class Record:
    """One call of a unit: its inputs, the state it ran in, and the slots of its saved tensors."""

    __slots__ = (
        "__weakref__",
        "_metadata",
        "ambient",
        "arguments",
        "busy",
        "cache",
        "external_keys",
        "forward",
        "forward_seconds",
        "held",
        "holders",
        "leaves",
        "lock",
        "module_state",
        "name",
        "num_replays",
        "observers",
        "pinned",
        "position",
        "serial",
        "stash",
        "trusted",
    )

    def __init__(
        self,
        forward: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        name: str,
        position: int,
        module_state: ModuleState,
        held: bool,
        cache: SelectiveCache | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.name = name
        self.position = position
        self.serial = -1
        self.stash: Stash | None = None
        """Where tensors of this record were moved, None if none were."""
        self.forward = forward
        self.held = held
        """Whether saved tensors are held from now on."""
        self.observers = Observers() if observers is None else observers
        """Hooks that a replay leaves out."""
        self.cache = cache
        """Results of chosen ops that a replay need not compute again."""
        self.pinned: str | None = None
        """Why the record can never be evicted, None if it can."""
        self.trusted = False
        """Whether nobody has compared a replay with a forward, since the user vouches for it."""
        self.busy = False
        """Whether it is being replayed, when nothing may evict it."""
        self.leaves = False
        """Whether what it holds is about to be let go or moved, when nothing need evict it."""
        self.num_replays = 0
        self.forward_seconds: float | None = None
        """Seconds that the forward took, None while it runs."""
        self.lock = threading.RLock()
        self.holders: list[weakref.ref[Holder]] = []
        self._metadata: list[SlotMetadata | None] = []
        self.module_state = module_state
        self.arguments = CallArguments(*call)
        tensors = [*self.arguments.aliases(), *module_state.tensors()]
        self.external_keys = frozenset(map(torch_private.storage_key, tensors))
        generators = (*module_state.generators, *self.arguments.generators)
        self.ambient = capture_ambient(_accelerators(tensors), generators)

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Takes one saved tensor from autograd; every saved tensor takes a slot, in order."""
        if self.cache is not None:
            self.cache.note_slot()
        holder = Holder()
        holder.record = self
        holder.index = len(self.holders)
        key = torch_private.storage_key(tensor)
        holder.external = external = key is not None and key in self.external_keys
        holder.version = version_of(tensor)
        holder.handle = None
        if external or self.held:
            # detached: an output of the unit would hold its own graph, and with it this holder
            holder.tensor = tensor.detach() if tensor.requires_grad else tensor
            metadata = None  # a tensor that is held tells it itself
        else:
            holder.tensor = None
            metadata = SlotMetadata.of(tensor)
        self.holders.append(weakref.ref(holder))
        self._metadata.append(metadata)
        return holder

    @property
    def num_slots(self) -> int:
        """How many tensors forward saved."""
        return len(self.holders)

    def metadata_of(self, index: int) -> SlotMetadata | None:
        """Returns what forward saved at a position, None if nobody needs it any more."""
        holder = self.holders[index]()
        if holder is not None and holder.tensor is not None:
            return SlotMetadata.of(holder.tensor)
        return self._metadata[index]

    def live_holders(self) -> list[Holder]:
        """Returns the holders that autograd still needs."""
        return [holder for ref in self.holders if (holder := ref()) is not None]

    @property
    def is_evictable(self) -> bool:
        """Whether a replay could give back what an eviction takes."""
        return (
            self.pinned is None
            and not self.arguments.mutated_positions()  # `x += unit(x)`
            and self.module_state.changed_tensor() is None
        )

    def own_bytes(self) -> int:
        """Returns the bytes held: distinct storages in memory, external ones not counted."""
        return sum(nbytes for _, nbytes in self._own_storages())

    def leaving_bytes(self) -> int:
        """Returns the bytes among them that are about to be let go or moved."""
        if not self.leaves:
            return 0
        results = () if self.cache is None else self.cache.tensors()
        return self.own_bytes() - sum(nbytes for _, nbytes in _storages(results))

    def evict(self) -> int:
        """Lets go of every own tensor and returns the bytes whose storage died, measured.

        What something else still holds (an output used outside, autocast's weight copies) does not
        count. A record that cannot be replayed (any more), or is being replayed, is left alone.
        """
        if self.busy or not self.is_evictable or not self.lock.acquire(blocking=False):
            return 0
        try:
            storages = self._own_storages()
            self.cache = None
            self.let_go()
            return sum(nbytes for storage, nbytes in storages if storage() is None)
        finally:
            self.lock.release()

    def let_go(self) -> None:
        """Lets go of every own saved tensor, not of the results kept for a replay."""
        self.held = False
        for holder in self.live_holders():
            if holder.tensor is not None and not holder.external:
                if version_of(holder.tensor) != holder.version:
                    holder.version = STALE
                self._metadata[holder.index] = SlotMetadata.of(holder.tensor)
                holder.tensor = None

    def move(self, stash: Stash) -> int:
        """Moves every own saved tensor away and returns the bytes whose storage died, measured.

        Raises:
            StashError: If there is no room; nothing has moved then.
        """
        storages = self._own_storages()
        holders = [h for h in self.live_holders() if h.tensor is not None and not h.external]
        self._put(stash, [h for h in holders if h.tensor is not None and self._is_fresh(h)])
        return sum(nbytes for storage, nbytes in storages if storage() is None)

    def move_inputs(self, stash: Stash, *, shared: Collection[int] = ()) -> None:
        """Moves the inputs that need a gradient, and what was saved of them.

        Others (masks, positions) are shared by all units, and moving them would free nothing.

        Args:
            stash: Where to.
            shared: Positions of inputs that other calls hold as well, which stay.

        Raises:
            StashError: If there is no room; nothing has moved then.
        """
        arguments = enumerate(self.arguments.tensors())
        moved = [
            argument for i, argument in arguments if argument.requires_grad and i not in shared
        ]
        moved = list({id(argument): argument for argument in moved}.values())
        keys = {torch_private.storage_key(argument.tensor()) for argument in moved}
        saved = [
            holder
            for holder in self.live_holders()
            if holder.external
            and holder.tensor is not None
            and torch_private.storage_key(holder.tensor) in keys
            and self._is_fresh(holder)
        ]
        self._put(stash, saved, [a for a in moved if not a.mutated])

    def prefetch(self) -> None:
        """Begins to bring back what was moved, since backward is about to come to this record."""
        if self.stash is not None:
            handles = [h.handle for h in self.live_holders() if h.tensor is None]
            handles += [argument.handle for argument in self.arguments.tensors()]
            self.stash.prefetch([handle for handle in handles if handle is not None])

    def _put(self, stash: Stash, holders: list[Holder], arguments: Sequence[Argument] = ()) -> None:
        self.stash = stash
        tensors = [holder.tensor for holder in holders if holder.tensor is not None]
        handles = stash.put([*tensors, *(argument.tensor() for argument in arguments)])
        del tensors
        for holder, handle in zip(holders, handles, strict=False):
            if handle is not None:
                holder.handle, holder.tensor = handle, None
        for argument, handle in zip(arguments, handles[len(holders) :], strict=True):
            if handle is not None:
                argument.leave_to(handle)

    @staticmethod
    def _is_fresh(holder: Holder) -> bool:
        return holder.tensor is not None and version_of(holder.tensor) == holder.version

    def read(self, holder: Holder) -> torch.Tensor:
        """Returns the tensor of a filled holder, refusing one that was changed in place."""
        tensor = holder.tensor
        assert tensor is not None, "a holder is filled before it is read"
        if holder.version == STALE or version_of(tensor) != holder.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: saved tensor {holder.index} "
                f"({self.metadata_of(holder.index)}) of unit {self.name!r}, saved at version "
                f"{holder.version}. Plain PyTorch refuses "
                "this as well; clone the tensor before the in-place operation."
            )
        return tensor

    def _own_storages(self) -> list[tuple[weakref.ref[Any], int]]:
        return _storages(self._own_tensors())

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        for holder in self.live_holders():
            if holder.tensor is not None and not holder.external:
                yield holder.tensor
        if self.cache is not None:
            yield from self.cache.tensors()


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[weakref.ref[Any], int]]:
    found: dict[int, tuple[weakref.ref[Any], int]] = {}
    for tensor in tensors:
        key = torch_private.storage_key(tensor)
        if key is not None and key not in found:
            storage = tensor.untyped_storage()
            found[key] = (weakref.ref(storage), storage.nbytes())
    return list(found.values())


def _accelerators(tensors: list[torch.Tensor]) -> tuple[torch.device, ...]:
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return tuple(sorted(devices, key=str)) if devices else ()

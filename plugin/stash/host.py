"""Host memory as a place for the tensors of an accelerator."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from rematic.byte_sizes import format_bytes
from rematic.memory import is_out_of_memory
from rematic.memory.storages import LiveStorages
from rematic.stash.copies import Copies, Copy, Event, copies_for
from rematic.stash.handle import StoredTensor, give_out, not_loaded
from rematic.stash.layout import Span, spans_of
from rematic.stash.stash import MIN_BYTES, Handle, Stash, StashError


class HostStash:
    """Moves tensors of an accelerator to host memory, on CUDA pinned and beside the computation.

    Tensors that are on the CPU are in host memory already: they go on to the overflow, or stay
    with the caller if there is none. Not run on a GPU yet.

    Args:
        cap_bytes: Host memory to hold at most, None for no limit. (Torch rounds pinned memory up
            to powers of two, so the process may hold up to twice as much.)
        overflow: Where tensors go that find no room here, None to refuse them.
        min_bytes: Size of a storage from which it is taken.
        in_flight_bytes: Memory of the device that copies under way may hold. A `put` waits when
            it would be more, `prefetch` begins no more than this.
        make_copies: Called once per device; returns how it copies, None if it needs no copies.

    Raises:
        ValueError: If a size is out of range.
    """

    name = "host"

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        overflow: Stash | None = None,
        min_bytes: int = MIN_BYTES,
        in_flight_bytes: int = 2**28,
        make_copies: Callable[[torch.device], Copies | None] = copies_for,
    ) -> None:
        if cap_bytes is not None and cap_bytes < 0:
            raise ValueError(f"cap_bytes is {cap_bytes}: expected None or 0 and more")
        if in_flight_bytes <= 0:
            raise ValueError(f"in_flight_bytes is {in_flight_bytes}: expected more than 0")
        self.cap_bytes = cap_bytes
        """Host memory to hold at most, None for no limit."""
        self.min_bytes = min_bytes
        """Size of a storage from which it is taken."""
        self._overflow = overflow
        self._make_copies = make_copies
        self._copies: dict[torch.device, Copies | None] = {}
        self._live = LiveStorages()
        self._in_flight = _InFlight(in_flight_bytes)
        self._prefetched: list[weakref.ref[_HostBlock]] = []
        # Re-entrant: an op in here that runs out of memory may be answered by another `put`.
        self._lock = threading.RLock()

    @property
    def lossy(self) -> bool:
        """Whether the overflow is."""
        return self._overflow is not None and self._overflow.lossy

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that living handles hold, those of the overflow not counted."""
        return self._live.num_bytes

    def put(self, tensors: Sequence[torch.Tensor]) -> list[Handle | None]:
        """Begins to copy tensors to host memory (see `Stash.put`).

        The caller may let go of them at once: their memory is reused when it has been copied.
        """
        stored: list[tuple[Span, _HostBlock]] = []
        passed_on: list[Span] = []
        with self._lock:
            for span in spans_of(tensors, min_bytes=self.min_bytes):
                block = self._store(span)
                if block is None:
                    passed_on.append(span)
                else:
                    stored.append((span, block))
        handles: list[Handle | None] = [*give_out(len(tensors), stored)]
        del stored
        try:
            self._pass_on(tensors, passed_on, handles)
        except StashError:
            handles.clear()  # nothing is taken, also while the error is being handled
            raise
        return handles

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Begins to copy tensors back, in this order, within the window."""
        others: list[Handle] = []
        with self._lock:
            self._prefetched = [ref for ref in self._prefetched if _waiting_bytes(ref)]
            room = self._in_flight.limit_bytes - sum(map(_waiting_bytes, self._prefetched))
            for handle in handles:
                block = handle.block if isinstance(handle, StoredTensor) else None
                if not isinstance(block, _HostBlock):
                    others.append(handle)
                elif block.num_bytes <= room:
                    room -= self._begin(block)
        if others and self._overflow is not None:
            self._overflow.prefetch(others)

    def close(self) -> None:
        """Closes the overflow; what is in host memory lives as long as its handles."""
        if self._overflow is not None:
            self._overflow.close()

    def _begin(self, block: _HostBlock) -> int:
        try:
            block.prefetch()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return 0  # it will be asked for in its time
        self._prefetched.append(weakref.ref(block))
        return block.waiting_bytes

    def _copies_for(self, device: torch.device) -> Copies | None:
        if device not in self._copies:
            self._copies[device] = self._make_copies(device)
        return self._copies[device]

    def _store(self, span: Span) -> _HostBlock | None:
        copies = self._copies_for(span.device)
        if copies is None or (
            self.cap_bytes is not None and self.used_bytes + span.num_bytes > self.cap_bytes
        ):
            return None
        self._in_flight.make_room(span.num_bytes)
        try:
            host = copies.to_host(span.elements(torch.uint8))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None  # no more host memory: as if the cap were reached
        self._live.note(host.tensor.untyped_storage())
        if host.done is not None:
            self._in_flight.add(host.done, span.num_bytes)
        return _HostBlock(host, copies, span)

    def _pass_on(
        self, tensors: Sequence[torch.Tensor], spans: list[Span], handles: list[Handle | None]
    ) -> None:
        positions = [position for span in spans for position in span.positions]
        if positions and self._overflow is not None:
            others = self._overflow.put([tensors[position] for position in positions])
            for position, handle in zip(positions, others, strict=True):
                handles[position] = handle
            return
        without_room = [span for span in spans if self._copies_for(span.device) is not None]
        if without_room:
            wanted = sum(span.num_bytes for span in without_room)
            cap = "no cap" if self.cap_bytes is None else f"a cap of {self.cap_bytes} bytes"
            raise StashError(
                f"cannot move {format_bytes(wanted)} to host memory: {self.used_bytes} bytes are "
                f"held there under {cap}, and there is no overflow. The tensors stay on the "
                "device. Raise cap_bytes, or give the host stash a disk stash as its overflow."
            )


class _InFlight:
    """The copies from the device that may not be done, oldest first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._events: deque[tuple[Event, int]] = deque()
        self._num_bytes = 0

    def make_room(self, num_bytes: int) -> None:
        """Waits until so many more bytes are within the limit, or nothing is under way."""
        while self._events:
            event, size = self._events[0]
            if not event.query():
                if self._num_bytes + num_bytes <= self.limit_bytes:
                    return
                event.synchronize()
            self._events.popleft()
            self._num_bytes -= size

    def add(self, event: Event, num_bytes: int) -> None:
        self._events.append((event, num_bytes))
        self._num_bytes += num_bytes


class _HostBlock:
    """Bytes in host memory."""

    __slots__ = ("__weakref__", "_copies", "_device", "_host", "_loaded", "_prefetched", "_ready")

    def __init__(self, host: Copy, copies: Copies, span: Span) -> None:
        self._host = host
        self._copies = copies
        self._device = span.device
        self._loaded: Callable[[], torch.UntypedStorage | None] = not_loaded
        # Held until it is asked for; from then on whoever asked holds it.
        self._prefetched: torch.UntypedStorage | None = None
        self._ready: Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the span."""
        return self._host.tensor.numel()

    @property
    def stored_bytes(self) -> int:
        """Bytes in host memory."""
        return self.num_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes on the device that were prefetched and not asked for yet."""
        return self.num_bytes if self._prefetched is not None else 0

    def prefetch(self) -> None:
        """Begins to copy back what is not on the device."""
        if self._loaded() is None:
            self._prefetched = self._begin()

    def load(self) -> torch.UntypedStorage:
        """Returns the storage, ordering what is computed next after the copy."""
        storage = self._loaded()
        if storage is None:
            storage = self._begin()
        self._prefetched = None
        self._copies.wait(self._ready)
        return storage

    def _begin(self) -> torch.UntypedStorage:
        copy = self._copies.to_device(self._host, self._device)
        storage = copy.tensor.untyped_storage()
        self._loaded = weakref.ref(storage)
        self._ready = copy.done
        return storage


def _waiting_bytes(block: weakref.ref[_HostBlock]) -> int:
    alive = block()
    return alive.waiting_bytes if alive is not None else 0

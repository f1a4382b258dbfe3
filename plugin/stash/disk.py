"""The disk as a place for saved tensors: on a CPU the next tier after the heap."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from rematic.byte_sizes import format_bytes
from rematic.stash.handle import StoredTensor, give_out, not_loaded
from rematic.stash.layout import Span, spans_of
from rematic.stash.scratch_file import PAGE_BYTES, ScratchFile
from rematic.stash.segments import Segment, Segments
from rematic.stash.stash import MIN_BYTES, Handle, StashError

_PIECE_BYTES = 2**24
"""How much of a device's memory goes through the heap at a time."""


class DiskStash:
    """Moves tensors into a scratch file; on a CPU they come back as mappings of it.

    What `get` returns then takes no heap: its bytes are pages of the file. Writing to it changes
    what a later `get` returns, as writing to a saved tensor does in plain PyTorch. Tensors of
    other devices are copied back to them.

    The file keeps the size that it once needed until it is closed. It is removed by `close`, when
    the stash and its handles die, at the end of the process, and after a crash by the next
    `DiskStash` in the directory.

    Args:
        directory: Where the scratch file goes; made if it is missing.
        cap_bytes: Size that the file may reach, None for what the disk has.
        min_bytes: Size of a storage from which it is taken.
        chunk_bytes: What the file grows by, at least.

    Raises:
        ValueError: If the directory cannot be written, or a size is out of range.
    """

    name = "disk"
    lossy = False

    def __init__(
        self,
        directory: str | Path,
        *,
        cap_bytes: int | None = None,
        min_bytes: int = MIN_BYTES,
        chunk_bytes: int = 2**26,
    ) -> None:
        if cap_bytes is not None and cap_bytes < PAGE_BYTES:
            raise ValueError(
                f"cap_bytes is {cap_bytes}: expected None or at least one page of {PAGE_BYTES} "
                "bytes. Raise the cap of the disk stash, or choose another action."
            )
        if chunk_bytes < PAGE_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}: expected {PAGE_BYTES} or more")
        self.min_bytes = min_bytes
        """Size of a storage from which it is taken."""
        self._segments = Segments(
            page_bytes=PAGE_BYTES, chunk_bytes=chunk_bytes, cap_bytes=cap_bytes
        )
        self._file = ScratchFile(Path(directory))
        # Re-entrant: an op in here that runs out of memory may be answered by another `put`.
        self._lock = threading.RLock()

    @property
    def path(self) -> Path:
        """The scratch file."""
        return self._file.path

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that living handles, and tensors that came from them, hold."""
        return self._segments.used_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._segments.size_bytes

    def put(self, tensors: Sequence[torch.Tensor]) -> list[StoredTensor | None]:
        """Writes tensors to the file (see `Stash.put`)."""
        spans = spans_of(tensors, min_bytes=self.min_bytes)
        with self._lock:
            return give_out(len(tensors), [(span, self._store(span)) for span in spans])

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Lets the system read ahead what it may have written out."""
        for handle in handles:
            if isinstance(handle, StoredTensor) and isinstance(handle.block, _DiskBlock):
                handle.block.read_ahead()

    def close(self) -> None:
        """Removes the file; tensors that came back from it stay valid."""
        with self._lock:
            self._file.close()

    def _store(self, span: Span) -> _DiskBlock:
        if not self._file.is_writable:
            raise StashError(
                f"cannot move {span.num_bytes} bytes to {self.path}: the disk stash was closed, or "
                "belongs to the process that forked this one. Make a new one."
            )
        segment = self._room_for(span.num_bytes) if span.num_bytes else None
        if segment is not None:
            try:
                _write(self._file, segment, span)
            except OSError as error:
                self._segments.give_back(segment)
                raise self._failure(span.num_bytes, _reason(error)) from error
        return _DiskBlock(self._file, segment, span, give_back=self._segments.give_back)

    def _room_for(self, num_bytes: int) -> Segment:
        segment = self._segments.take(num_bytes)
        if segment is not None:
            return segment
        reason = f"it may not grow beyond its cap of {self._segments.cap_bytes} bytes"
        for size in self._segments.growths(num_bytes):
            try:
                self._file.add_chunk(size)
            except OSError as error:
                reason = _reason(error)
                continue
            self._segments.add_chunk(size)
            segment = self._segments.take(num_bytes)
            assert segment is not None, "a chunk was added that holds it"
            return segment
        raise self._failure(num_bytes, reason)

    def _failure(self, num_bytes: int, reason: str) -> StashError:
        return StashError(
            f"cannot move {format_bytes(num_bytes)} to {self.path}: {reason}. The file has "
            f"{self.file_bytes} bytes, of which {self.used_bytes} are in use and at most "
            f"{self._segments.largest_free_bytes} are free in one piece. The tensors stay in "
            "memory. Make room on that disk, raise cap_bytes, or choose another directory."
        )


class _DiskBlock:
    """A segment of the file, given back when handles and loaded tensors are gone."""

    __slots__ = ("__weakref__", "_device", "_file", "_loaded", "_segment", "num_bytes")

    def __init__(
        self,
        file: ScratchFile,
        segment: Segment | None,
        span: Span,
        *,
        give_back: Callable[[Segment], None],
    ) -> None:
        self.num_bytes = span.num_bytes
        self._file = file
        self._segment = segment
        self._device = span.device
        self._loaded: Callable[[], torch.UntypedStorage | None] = not_loaded
        if segment is not None:
            weakref.finalize(self, give_back, segment).atexit = False

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file, whole pages."""
        return self._segment.num_bytes if self._segment is not None else 0

    def load(self) -> torch.UntypedStorage:
        """Maps the segment, or copies it to its device."""
        storage = self._loaded()
        if storage is None:
            storage = self._read()
            self._loaded = weakref.ref(storage)
        return storage

    def read_ahead(self) -> None:
        if self._segment is not None:
            self._file.read_ahead(self._segment)

    def _read(self) -> torch.UntypedStorage:
        if self._segment is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        if not self._file.is_open:
            raise RuntimeError(
                f"a tensor of {self.num_bytes} bytes cannot be read: its scratch file "
                f"{self._file.path} was closed before backward asked for it. Close the stash after "
                "the last backward."
            )
        mapped = self._file.map(self._segment, self.num_bytes)
        # The mapping needs the segment as long as it lives, also when all handles are gone.
        weakref.finalize(mapped, _end_mapping, self, self._file, self._segment).atexit = False
        if self._device.type == "cpu":
            return mapped
        flat = torch.empty(0, dtype=torch.uint8).set_(mapped)
        return flat.to(self._device).untyped_storage()


def _end_mapping(block: _DiskBlock, file: ScratchFile, segment: Segment) -> None:
    del block  # it was held until now
    file.unmap(segment)


def _write(file: ScratchFile, segment: Segment, span: Span) -> None:
    if span.device.type == "cpu":
        file.write(segment, span.storage.data_ptr() + span.start_bytes, span.num_bytes)
        return
    flat = span.elements(torch.uint8)
    for skip in range(0, flat.numel(), _PIECE_BYTES):
        host = flat[skip : skip + _PIECE_BYTES].cpu()
        file.write(segment, host.data_ptr(), host.numel(), skip_bytes=skip)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

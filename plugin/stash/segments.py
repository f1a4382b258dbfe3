"""Where in a file there is room: a best-fit allocator over chunks, without torch or a file."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range that belongs to somebody."""

    chunk: int
    """Number of the chunk, from 0."""
    offset_bytes: int
    """Start, from the start of the chunk."""
    num_bytes: int
    """Size, a multiple of the page."""


@dataclass(slots=True)
class _Chunk:
    # Free ranges as (start, size), in order; no two of them touch.
    free: list[tuple[int, int]] = field(default_factory=list)

    def give(self, start: int, size: int) -> None:
        index = bisect.bisect(self.free, (start, size))
        if index < len(self.free) and self.free[index][0] == start + size:
            size += self.free.pop(index)[1]
        if index > 0 and sum(self.free[index - 1]) == start:
            index -= 1
            before = self.free.pop(index)
            start, size = before[0], before[1] + size
        self.free.insert(index, (start, size))

    def take(self, index: int, num_bytes: int) -> int:
        start, size = self.free[index]
        if size == num_bytes:
            del self.free[index]
        else:
            self.free[index] = (start + num_bytes, size - num_bytes)
        return start


class Segments:
    """Hands out segments of a file that grows by chunks.

    Segments lie within one chunk. The smallest free range that fits is taken, so that batches of
    the same shapes find the places of those before them, and the file grows only when none fits.
    """

    def __init__(self, *, page_bytes: int, chunk_bytes: int, cap_bytes: int | None = None) -> None:
        self.page_bytes = page_bytes
        """What sizes are rounded up to."""
        self.cap_bytes = cap_bytes
        """Size that the file may reach, None for no limit."""
        self.size_bytes = 0
        """Size of the file."""
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []
        self._used_bytes = 0
        self._lock = threading.Lock()
        # Handles die anywhere, also in a collection that starts while the lock is held: they only
        # leave their segment here.
        self._returned: deque[Segment] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of the segments that belong to somebody."""
        with self._lock:
            self._take_back()
            return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest segment that fits without growth."""
        with self._lock:
            self._take_back()
            return max((size for chunk in self._chunks for _, size in chunk.free), default=0)

    def take(self, num_bytes: int) -> Segment | None:
        """Returns a segment of at least so many bytes, None if the file has to grow for it."""
        needed = self._rounded(num_bytes)
        with self._lock:
            self._take_back()
            fits = (
                (size, number, index)
                for number, chunk in enumerate(self._chunks)
                for index, (_, size) in enumerate(chunk.free)
                if size >= needed
            )
            _, number, index = min(fits, default=(0, -1, -1))
            if number < 0:
                return None
            self._used_bytes += needed
            start = self._chunks[number].take(index, needed)
            return Segment(chunk=number, offset_bytes=start, num_bytes=needed)

    def give_back(self, segment: Segment) -> None:
        """Frees a segment; safe at any time and in any thread."""
        self._returned.append(segment)

    def growths(self, num_bytes: int) -> list[int]:
        """Returns the sizes of chunks that would do, the best first; none if the cap forbids.

        A file grows by a quarter at least: every chunk is a mapping, of which there should be few.
        """
        needed = self._rounded(num_bytes)
        wanted = self._rounded(max(needed, self._chunk_bytes, self.size_bytes // 4))
        if self.cap_bytes is not None:
            left = self.cap_bytes - self.size_bytes
            wanted = min(wanted, left - left % self.page_bytes)
        return sorted({size for size in (wanted, needed) if needed <= size <= wanted}, reverse=True)

    def add_chunk(self, num_bytes: int) -> None:
        """Notes that the file has grown by a chunk."""
        with self._lock:
            self._chunks.append(_Chunk([(0, num_bytes)]))
            self.size_bytes += num_bytes

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.page_bytes) * self.page_bytes

    def _take_back(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            self._used_bytes -= segment.num_bytes
            self._chunks[segment.chunk].give(segment.offset_bytes, segment.num_bytes)

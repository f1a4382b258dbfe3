"""A scratch file: reserved chunk by chunk, written by calls, read through mappings.

Written by calls, as a full disk is then an error; a write through a mapping would end the process.
Read through shared mappings, as they need no heap: neither a limit on the heap (`RLIMIT_DATA`) nor
the allocator counts them, and the system takes their pages away when memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import time
import weakref
from pathlib import Path

import torch

from rematic.byte_sizes import format_bytes
from rematic.stash.segments import Segment

PAGE_BYTES = mmap.PAGESIZE
_MOUNTS = Path("/proc/self/mountinfo")
_PREFIX, _SUFFIX = "rematic-stash-", ".scratch"
_READ_ONLY = 0x100  # PyBUF_READ of the C API
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_log = logging.getLogger("rematic")


class ScratchFile:
    """A file of its own in a directory, removed when it is closed or the process ends.

    Its name carries the process and the time, and it is locked: what the lock of a dead process
    no longer protects is removed by the next `ScratchFile` in that directory. A forked child may
    read it and not write it.

    Raises:
        ValueError: If no file can be made in the directory.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(directory)
            self._fd, self.path = _create(directory)
        except OSError as error:
            raise ValueError(
                f"cannot make a scratch file in {str(directory)!r} ({error.strerror}): expected a "
                "directory that can be written. Choose another one for the disk stash."
            ) from error
        if _is_memory(directory):
            _log.warning(
                "%s is on a file system that is memory itself: what moves there leaves the heap "
                "but not the machine's memory. Choose a directory on a disk.",
                self.path,
            )
        self._pid = os.getpid()
        self._maps: list[mmap.mmap] = []
        self._starts = [0]
        self._remove = weakref.finalize(self, _remove, self._fd, self.path, self._pid)

    @property
    def is_open(self) -> bool:
        """Whether it can be read."""
        return self._remove.alive

    @property
    def is_writable(self) -> bool:
        """Whether it is open, in the process that made it."""
        return self.is_open and os.getpid() == self._pid

    def close(self) -> None:
        """Removes the file; what is mapped stays readable until the last mapping goes."""
        self._remove()
        self._maps.clear()

    def add_chunk(self, num_bytes: int) -> None:
        """Grows by a chunk, reserving the room on the disk.

        Raises:
            OSError: If there is no such room; the file is then as it was.
        """
        start = self._starts[-1]
        try:
            _reserve(self._fd, start, num_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise
        self._maps.append(mmap.mmap(self._fd, num_bytes, offset=start))
        self._starts.append(start + num_bytes)

    def write(self, segment: Segment, address: int, num_bytes: int, *, skip_bytes: int = 0) -> None:
        """Writes memory into a segment, from so many bytes after its start on.

        Raises:
            OSError: If the disk is full or fails.
        """
        place = self._starts[segment.chunk] + segment.offset_bytes + skip_bytes
        memory = _memory_at(address, num_bytes, _READ_ONLY)
        while memory:
            written = os.pwrite(self._fd, memory, place)  # at most 2 GiB a call
            memory, place = memory[written:], place + written

    def map(self, segment: Segment, num_bytes: int) -> torch.UntypedStorage:
        """Returns the first bytes of a segment as a storage that lies in the file."""
        return torch.frombuffer(
            self._maps[segment.chunk],
            dtype=torch.uint8,
            count=num_bytes,
            offset=segment.offset_bytes,
        ).untyped_storage()

    def read_ahead(self, segment: Segment) -> None:
        """Asks the system to read a segment from the disk soon."""
        self._advise(segment, "MADV_WILLNEED")

    def unmap(self, segment: Segment) -> None:
        """Takes the pages of a segment out of the process; their bytes stay in the file."""
        self._advise(segment, "MADV_DONTNEED")

    def _advise(self, segment: Segment, name: str) -> None:
        advice = getattr(mmap, name, None)
        if advice is not None and self.is_open:
            pages = self._maps[segment.chunk]
            with contextlib.suppress(OSError, ValueError):  # it is advice only
                pages.madvise(advice, segment.offset_bytes, segment.num_bytes)


def _create(directory: Path) -> tuple[int, Path]:
    started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for serial in itertools.count():
        path = directory / f"{_PREFIX}{os.getpid()}-{started}-{serial}{_SUFFIX}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        # Between open and lock somebody may take it for a stale file: then there is no such file.
        if _lock(fd, path) and _is_at(fd, path):
            return fd, path
        os.close(fd)
    raise AssertionError("itertools.count never ends")


def _lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning(
            "the file system of %s has no locks (%s): if this process is killed, remove the file "
            "by hand",
            path,
            error.strerror,
        )
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_stale(directory: Path) -> None:
    """Removes the files of processes that are gone; one that is locked, or may be, stays."""
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size_bytes = os.fstat(fd).st_size
                path.unlink()
                _log.warning(
                    "removed %s (%s): its process is gone and left it behind",
                    path,
                    format_bytes(size_bytes) if size_bytes else "empty",
                )
            finally:
                os.close(fd)


def _is_memory(directory: Path) -> bool:
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):  # Linux only
        for line in _MOUNTS.read_text("utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0] in ("tmpfs", "ramfs")
    return False


def _reserve(fd: int, start: int, num_bytes: int) -> None:
    reserve = getattr(os, "posix_fallocate", None)  # not on macOS
    if reserve is not None:
        try:
            reserve(fd, start, num_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    # Without a reservation the writes tell that the disk is full.
    os.ftruncate(fd, start + num_bytes)


def _remove(fd: int, path: Path, pid: int) -> None:
    os.close(fd)
    if os.getpid() == pid:  # a forked child that ends must leave the file to its parent
        path.unlink(missing_ok=True)

"""What limits the memory of this process on the host."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096  # Windows
_UNLIMITED_BYTES = 2**60  # cgroup v1 writes the largest page-aligned integer, v2 the word `max`


class _KernelFile:
    """A short file of the kernel that is read at every step: 1 us open, 28 us to open and read.

    It is opened once for each process, since `/proc/self` is whoever opened it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number: int | None = None
        self._owner: int | None = None

    def read(self) -> bytes:
        """Returns what the file says now, nothing if it cannot be read."""
        try:
            if self._number is None or self._owner != os.getpid():
                self._number, self._owner = os.open(self._path, os.O_RDONLY), os.getpid()
            return os.pread(self._number, 4096, 0)
        except (OSError, AttributeError):  # there is no `pread` on Windows
            return b""

    def __del__(self) -> None:
        if self._number is not None:
            os.close(self._number)


@dataclass(frozen=True, kw_only=True)
class HostFiles:
    """Where the kernel tells about memory; other paths in tests."""

    proc: Path = Path("/proc")
    """The process file system."""
    cgroup: Path = Path("/sys/fs/cgroup")
    """The control groups, v2 or v1."""

    def resident_bytes(self) -> int | None:
        """Returns the bytes of this process that are in physical memory, None if not known."""
        return self.process_bytes()[0]

    def data_bytes(self) -> int | None:
        """Returns the writable private memory of this process, which `RLIMIT_DATA` limits.

        The main stack (about 130 KiB) is in it although the limit does not count it.
        """
        return self.process_bytes()[1]

    def process_bytes(self) -> tuple[int | None, int | None]:
        """Returns `resident_bytes` and `data_bytes` of one moment, read at once."""
        columns = self._statm.read().split()
        if len(columns) < 6:
            return None, None
        return int(columns[1]) * _PAGE_BYTES, int(columns[5]) * _PAGE_BYTES

    def physical_bytes(self) -> int | None:
        """Returns the physical memory of the host, None if not known."""
        text = _read(self.proc / "meminfo")
        for line in [] if text is None else text.splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
        return None

    def cgroup_bytes(self) -> int | None:
        """Returns the smallest limit of the control groups of this process, None if there is none.

        A group is limited by its ancestors too. Inside a container the group of the process may
        not be visible; the root of the file system is then the container's own group.
        """
        limits = [
            limit
            for folder, name in self._cgroup_folders()
            if (limit := _limit(folder / name)) is not None
        ]
        return min(limits, default=None)

    def _cgroup_folders(self) -> list[tuple[Path, str]]:
        folders = [
            (self.cgroup, "memory.max"),
            (self.cgroup / "memory", "memory.limit_in_bytes"),
        ]
        text = _read(self.proc / "self" / "cgroup")
        for line in [] if text is None else text.splitlines():
            _, controllers, path = line.split(":", 2)
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(1, len(parts) + 1):
                inner = Path(*parts[:depth])
                if not controllers:
                    folders.append((self.cgroup / inner, "memory.max"))
                elif "memory" in controllers.split(","):
                    folders.append((self.cgroup / "memory" / inner, "memory.limit_in_bytes"))
        return folders

    @functools.cached_property
    def _statm(self) -> _KernelFile:
        return _KernelFile(self.proc / "self" / "statm")


def data_limit_bytes() -> int | None:
    """Returns the soft `RLIMIT_DATA` of this process, None where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def _limit(path: Path) -> int | None:
    text = _read(path)
    if text is None or not text.strip().isdigit():
        return None
    limit = int(text)
    return limit if 0 < limit < _UNLIMITED_BYTES else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return None

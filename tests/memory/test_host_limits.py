"""What limits a process on the host, read from the files of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rematic.memory import host_limits
from rematic.memory.host_limits import HostFiles, data_limit_bytes

GIB = 2**30
NO_LIMIT_V1 = "9223372036854771712\n"


def host(tmp_path: Path, files: dict[str, str]) -> HostFiles:
    """A host with these files; `proc/...` and `cgroup/...`."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "ascii")
    return HostFiles(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="no-groups"),
        pytest.param({"cgroup/memory.max": f"{4 * GIB}\n"}, 4 * GIB, id="v2-container"),
        pytest.param({"cgroup/memory.max": "max\n"}, None, id="v2-unlimited"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/user.slice/job.scope\n",
                "cgroup/user.slice/memory.max": f"{3 * GIB}\n",
                "cgroup/user.slice/job.scope/memory.max": f"{8 * GIB}\n",
            },
            3 * GIB,
            id="v2-ancestor-is-smaller",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../../outside\n",
                "cgroup/memory.max": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="v2-group-out-of-sight",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
                "cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
                "cgroup/memory/docker/abc/memory.limit_in_bytes": f"{5 * GIB}\n",
            },
            5 * GIB,
            id="v1",
        ),
        pytest.param({"cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1}, None, id="v1-unlimited"),
        pytest.param({"cgroup/memory.max": "0\n"}, None, id="nonsense-zero"),
        pytest.param({"cgroup/memory.max": "many\n"}, None, id="nonsense-word"),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert host(tmp_path, files).cgroup_bytes() == expected


def test_process_and_memory_files_are_read(tmp_path: Path) -> None:
    files = host(
        tmp_path,
        {
            "proc/self/statm": "2000 300 200 1 0 800 0\n",
            "proc/meminfo": "MemTotal:       16384 kB\nMemFree:    100 kB\n",
        },
    )
    page = os.sysconf("SC_PAGE_SIZE")
    assert files.resident_bytes() == 300 * page
    assert files.data_bytes() == 800 * page
    assert files.physical_bytes() == 16384 * 1024


def test_without_the_files_nothing_is_known(tmp_path: Path) -> None:
    files = host(tmp_path, {"proc/meminfo": "Slab: 3 kB\n"})
    assert files.resident_bytes() is None
    assert files.data_bytes() is None
    assert files.physical_bytes() is None
    assert host(tmp_path / "none", {}).physical_bytes() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's files")
def test_this_host_is_read() -> None:
    files = HostFiles()
    resident, physical = files.resident_bytes(), files.physical_bytes()
    assert resident is not None
    assert physical is not None
    assert 2**20 < resident < physical


def test_a_system_without_limits_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert data_limit_bytes() is None
    assert host_limits.data_limit_bytes is data_limit_bytes


def test_the_process_is_read_anew_every_time(tmp_path: Path) -> None:
    files = host(tmp_path, {"proc/self/statm": "1000 300 100 10 0 800 0\n"})
    page = os.sysconf("SC_PAGE_SIZE")
    assert files.process_bytes() == (300 * page, 800 * page)
    (tmp_path / "proc/self/statm").write_text("1000 301 100 10 0 801 0\n", "ascii")
    assert files.process_bytes() == (301 * page, 801 * page)


FORK = """
import os
from rematic.memory.host_limits import HostFiles

files = HostFiles()
files.process_bytes()
child = os.fork()
if child == 0:
    before = files.resident_bytes()
    ballast = b"1" * (64 << 20)
    os._exit(0 if files.resident_bytes() - before > 60 << 20 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_reads_its_own_files() -> None:
    """The file of a process is that of whoever opened it."""
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"

"""The file: it goes when its process goes, and never before; what the disk refuses is an error."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path

import pytest
import torch

from rematic.stash import scratch_file
from rematic.stash.scratch_file import PAGE_BYTES, ScratchFile
from rematic.stash.segments import Segment
from tests.stash.child import run_child, start_child

LEAVES_A_FILE = """
    stash = DiskStash(sys.argv[1])
    handles = stash.put([torch.ones(2**20)])
    tell(path=str(stash.path), pid=os.getpid())
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""
SEGMENT = Segment(chunk=0, offset_bytes=PAGE_BYTES, num_bytes=PAGE_BYTES)


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever pytest puts its directories."""
    monkeypatch.setattr(scratch_file, "_MOUNTS", Path("/nowhere"))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read_from_there(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.add_chunk(4 * PAGE_BYTES)
    source = torch.arange(1000)
    file.write(SEGMENT, source.data_ptr(), source.nbytes)
    storage = file.map(SEGMENT, source.nbytes)
    assert storage.nbytes() == 8000
    assert torch.equal(torch.empty(0, dtype=torch.int64).set_(storage), source)
    assert file.path.read_bytes()[PAGE_BYTES:][:8000] == bytes(source.view(torch.uint8).tolist())
    file.close()


def test_the_file_is_reserved_on_the_disk_chunk_by_chunk(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    for num_chunks in (1, 2, 3):
        file.add_chunk(2**20)
        status = file.path.stat()
        assert status.st_size == num_chunks * 2**20
        assert status.st_blocks * 512 >= num_chunks * 2**20
    file.close()


def test_close_removes_the_file_and_leaves_mappings_readable(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.add_chunk(4 * PAGE_BYTES)
    source = torch.arange(100)
    file.write(SEGMENT, source.data_ptr(), source.nbytes)
    mapped = torch.empty(0, dtype=torch.int64).set_(file.map(SEGMENT, source.nbytes))
    assert re.fullmatch(rf"rematic-stash-{os.getpid()}-\d{{8}}T\d{{6}}Z-0\.scratch", file.path.name)
    file.close()
    file.close()
    assert names_in(tmp_path) == []
    assert torch.equal(mapped, source)
    assert not file.is_open


def test_a_file_that_nobody_holds_any_more_is_removed(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    assert len(names_in(tmp_path)) == 1
    del file
    assert names_in(tmp_path) == []


def test_the_file_of_a_killed_process_goes_at_the_next_start_and_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_child(LEAVES_A_FILE, str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline()
    (theirs,) = names_in(tmp_path)
    assert theirs.startswith(f"rematic-stash-{process.pid}-")

    with caplog.at_level(logging.WARNING, logger="rematic"):
        mine = ScratchFile(tmp_path)
        assert set(names_in(tmp_path)) == {theirs, mine.path.name}  # theirs is alive
        assert caplog.records == []

        process.communicate("die\n")
        assert process.returncode == -9
        assert theirs in names_in(tmp_path)
        another = ScratchFile(tmp_path)
    assert set(names_in(tmp_path)) == {mine.path.name, another.path.name}
    (message,) = caplog.messages
    assert message == (
        f"removed {tmp_path / theirs} (64.0 MiB): its process is gone and left it behind"
    )
    mine.close()
    another.close()


def test_files_of_others_stay(tmp_path: Path) -> None:
    for name in ("journal.jsonl", "rematic-stash-1.txt", "other.scratch"):
        (tmp_path / name).touch()
    before = names_in(tmp_path)
    ScratchFile(tmp_path).close()
    assert names_in(tmp_path) == before


def test_a_file_that_is_taken_away_between_open_and_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that cleans up and sees a file which is not locked yet."""
    import fcntl

    def lock(fd: int, how: int) -> None:
        if len(removed) < 2:
            removed.append(path := next(tmp_path.iterdir()))
            path.unlink()

    removed: list[Path] = []
    monkeypatch.setattr(fcntl, "flock", lock)
    file = ScratchFile(tmp_path)
    assert len(removed) == 2
    assert file.path.exists()
    file.close()


def test_without_locks_it_works_and_says_what_that_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    stale = tmp_path / "rematic-stash-1-20250101T000000Z-0.scratch"
    stale.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, logger="rematic"):
        file = ScratchFile(tmp_path)
    assert stale.exists()  # it may belong to a live process
    assert caplog.messages == [
        f"the file system of {file.path} has no locks (No locks available): if this process is "
        "killed, remove the file by hand"
    ]
    file.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_is_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:99999 / /proc rw,nosuid - proc proc rw\n"
        f"23 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} here rw\n"
    )
    monkeypatch.setattr(scratch_file, "_MOUNTS", mounts)
    with caplog.at_level(logging.WARNING, logger="rematic"):
        file = ScratchFile(tmp_path)
    expected = (
        f"{file.path} is on a file system that is memory itself: what moves there leaves the heap "
        "but not the machine's memory. Choose a directory on a disk."
    )
    assert caplog.messages == ([expected] if kind == "tmpfs" else [])
    file.close()


def test_without_reservations_it_grows_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = ScratchFile(tmp_path)
    file.add_chunk(2**20)
    assert file.path.stat().st_size == 2**20
    file.close()


def test_a_reservation_that_fails_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, start: int, num_bytes: int) -> None:
        os.ftruncate(fd, start + num_bytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ScratchFile(tmp_path)
    file.add_chunk(2**16)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="No space left on device"):
            file.add_chunk(2**20)
    assert file.path.stat().st_size == 2**16
    file.add_chunk(2**16)
    assert file.path.stat().st_size == 2**17
    file.close()


def test_calls_that_write_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, memory, place: pwrite(fd, memory[:333], place))
    file = ScratchFile(tmp_path)
    file.add_chunk(4 * PAGE_BYTES)
    source = torch.arange(500)
    file.write(SEGMENT, source.data_ptr(), source.nbytes)
    mapped = torch.empty(0, dtype=torch.int64).set_(file.map(SEGMENT, source.nbytes))
    assert torch.equal(mapped, source)
    del mapped
    file.close()


@pytest.mark.parametrize(
    ("place", "reason"),
    [("a-file", "Not a directory"), ("/proc/rematic", "No such file or directory")],
)
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "a-file").touch()
    directory = tmp_path / place / "below"
    with pytest.raises(ValueError, match="cannot make a scratch file") as caught:
        ScratchFile(directory)
    assert str(caught.value) == (
        f"cannot make a scratch file in {str(directory)!r} ({reason}): expected a directory that "
        "can be written. Choose another one for the disk stash."
    )


def test_a_forked_child_may_not_write_it_nor_remove_it_and_a_failed_process_removes_it(
    tmp_path: Path,
) -> None:
    told = run_child(
        """
        stash = DiskStash(sys.argv[1])
        (handle,) = stash.put([torch.full((2**16,), 3.0)])
        readable, writable = os.pipe()
        if os.fork() == 0:
            try:
                stash.put([torch.ones(2**16)])
            except StashError as error:
                os.write(writable, str(error).encode())
            assert handle.get().eq(3).all()
            sys.exit(0)  # runs what is to run when a process ends
        os.wait()
        told = os.read(readable, 2**16).decode()
        tell(told=told, exists=stash.path.exists(), same=bool(handle.get().eq(3).all()))
        raise ValueError("the user's code fails")
        """,
        str(tmp_path),
        returncode=1,
    )
    assert told["exists"] is True
    assert told["same"] is True
    assert (
        "the disk stash was closed, or belongs to the process that forked this one"
        in (told["told"])
    )
    assert names_in(tmp_path) == []

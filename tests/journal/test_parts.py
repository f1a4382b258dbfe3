"""A journal that is too large for one file goes on in another, and reads as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rematic.journal import JournalTail, JournalWriter, find_journal, read_journal
from rematic.journal.parts import close_part, closed_parts, missing_parts


def write(path: Path, numbers: range, *, part_bytes: int = 200) -> None:
    with JournalWriter(path, part_bytes=part_bytes) as journal:
        for number in numbers:
            journal.write({"event": "step", "step": number})


def steps(path: Path) -> list[Any]:
    return [event["step"] for event in read_journal(path)]


def test_parts_are_closed_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(40))
    write(path, range(40, 60))
    parts = closed_parts(path)
    assert len(parts) > 9
    assert [part.name for part in parts[:2]] == ["journal.0001.jsonl", "journal.0002.jsonl"]
    assert all(part.stat().st_size <= 300 for part in (*parts, path))
    assert steps(path) == list(range(60))
    assert find_journal(tmp_path) == path
    assert steps(parts[0]) == [0, 1, 2, 3], "one part by itself"


def test_parts_that_are_gone_are_known(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(40))
    assert missing_parts(path) == []
    gone = [part for part in closed_parts(path) if part.name[8:12] in ("0001", "0004")]
    for part in gone:
        part.unlink()
    assert missing_parts(path) == gone
    assert steps(path) == [*range(4, 12), *range(16, 40)]


def test_a_name_with_brackets_has_parts_too(tmp_path: Path) -> None:
    path = tmp_path / "run[1].jsonl"
    write(path, range(40))
    assert steps(path) == list(range(40))


def test_a_part_that_is_closed_while_others_are_read_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(8))
    events = read_journal(path)
    read = [next(events)["step"]]
    write(path, range(8, 20))
    read += [event["step"] for event in events]
    assert read[:8] == list(range(8)), "what was there when reading began, and no step twice"
    assert read == sorted(set(read))


def test_other_files_are_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(2), part_bytes=10**6)
    for name in ("journal.old.jsonl", "journal.12.jsonl", "my-journal.0001.jsonl"):
        (tmp_path / name).write_text("no journal\n")
    assert steps(path) == [0, 1]


def test_a_process_that_died_while_closing_a_part_loses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(3), part_bytes=10**6)
    os.link(path, tmp_path / "journal.0001.jsonl")
    assert steps(path) == [0, 1, 2]
    write(path, range(3, 5), part_bytes=10**6)
    assert steps(path) == [0, 1, 2, 3, 4]
    assert steps(tmp_path / "journal.0001.jsonl") == [0, 1, 2]


def test_without_hard_links_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "journal.jsonl"
    write(path, range(20))
    assert closed_parts(path) == []
    assert not close_part(path)
    assert steps(path) == list(range(20))


def test_a_tail_follows_over_parts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(2), part_bytes=10**6)
    tail = JournalTail(path)
    assert list(tail.read()) == []
    with JournalWriter(path, part_bytes=300) as journal:
        for number in range(2, 5):
            journal.write({"event": "step", "step": number})
        assert len(closed_parts(path)) == 1
        assert [event["step"] for event in tail.read()] == [2, 3, 4]
    tail.close()


def test_a_tail_leaves_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, range(1), part_bytes=10**6)
    tail = JournalTail(path)
    with open(path, "a") as file:
        file.write('{"schema":1,"time":0,')
        file.flush()
        assert list(tail.read()) == []
        file.write('"event":"step","step":1}\n')
    assert [event["step"] for event in tail.read()] == [1]
    tail.close()

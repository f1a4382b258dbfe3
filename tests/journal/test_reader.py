from __future__ import annotations

from pathlib import Path

import pytest

from rematic.journal import JournalError, JournalWriter, find_journal, read_journal

GOOD = b'{"schema":1,"time":1.0,"event":"step"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"\n" + GOOD, "line 2 is not JSON"),
        (GOOD + b'{"schema":1\n' + GOOD, "restore the file, or cut it before this line"),
        (b"\xff\xfe\n", "line 1 is not JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON (maximum recursion depth exceeded"),
        (b"[1]\n", "line 1 is not an event: expected an object with schema, time, event"),
        (b'{"schema":1,"event":"x"}\n', "line 1 is not an event"),
        (GOOD.replace(b'"step"', b"[1]"), "expected a kind as a word and seconds as a number, got"),
        (
            GOOD + GOOD.replace(b"1", b"2", 1),
            "line 2 has schema 2; this version of rematic reads schema 1: "
            "read it with the version that wrote it",
        ),
    ],
    ids=[
        "empty line",
        "torn inside",
        "binary",
        "nested",
        "list",
        "no time",
        "no word",
        "other schema",
    ],
)
def test_refuses_damage_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError) as caught:
        list(read_journal(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", range(1, len(GOOD)))
def test_skips_a_torn_last_line_at_every_byte(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(GOOD + GOOD[:cut])
    assert [event["event"] for event in read_journal(path)] == ["step"]


def test_an_empty_journal_has_no_events(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    assert list(read_journal(path)) == []


def test_finds_the_journal_of_a_run_directory_or_file(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "journal.jsonl"
    journal.parent.mkdir()
    JournalWriter(journal).close()
    assert find_journal(tmp_path / "run") == journal
    assert find_journal(journal) == journal


def test_names_the_runs_there_are(tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    JournalWriter(tmp_path / "run-1" / "journal.jsonl").close()
    with pytest.raises(JournalError) as caught:
        find_journal(tmp_path / "run-2")
    assert str(caught.value) == (
        f"{tmp_path / 'run-2'} is not a run: there is no such file or directory; "
        f"expected a run directory; there are: {tmp_path / 'run-1'}"
    )
    with pytest.raises(JournalError, match=r"it holds no journal\.jsonl"):
        find_journal(tmp_path)

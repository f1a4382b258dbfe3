from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rematic.journal import JournalError, JournalWriter, read_journal


def test_writes_one_stamped_line_per_event(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl", clock=lambda: 12.3456789) as journal:
        journal.write({"event": "step", "step": 1, "plan": {"keep": 2}, "before": (1, None)})
        journal.write({"event": "stop", "reason": "because"})
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "schema": 1,
            "time": 12.345679,
            "event": "step",
            "step": 1,
            "plan": {"keep": 2},
            "before": [1, None],
        },
        {"schema": 1, "time": 12.345679, "event": "stop", "reason": "because"},
    ]


def test_a_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalWriter(path)
    journal.write({"event": "step"})
    assert len(path.read_text().splitlines()) == 1
    journal.close()


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write({"event": "step", "loss": math.nan, "bound": math.inf, "low": -math.inf})
    (event,) = read_journal(path)
    assert (event["loss"], event["bound"], event["low"]) == ("nan", "inf", "-inf")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({}, "an event needs its kind as a word under 'event', got None"),
        ({"event": 3}, "an event needs its kind as a word under 'event', got 3"),
        ({"event": "step", "time": 1}, "event 'step' sets 'time', which the writer sets itself"),
        ({"event": "step", "schema": 1}, "event 'step' sets 'schema', which the writer sets"),
        ({"event": "step", "x": [1, {"y": object()}]}, "step.x[1].y is a object, which a journal"),
        ({"event": "step", "x": {1, 2}}, "step.x is a set, which a journal cannot hold"),
    ],
    ids=["no kind", "kind not a word", "sets time", "sets schema", "nested object", "set"],
)
def test_refuses_what_is_not_an_event(
    tmp_path: Path, event: dict[str, object], message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal, pytest.raises(JournalError) as caught:
        journal.write(event)
    assert message in str(caught.value)
    assert path.read_bytes() == b""


def test_refuses_events_after_close(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal.jsonl")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed: event 'step' came too late"):
        journal.write({"event": "step"})


@pytest.mark.parametrize(
    "torn", [b'{"schema":1,"ti', b'{"schema":1,"time":1,"event":"x"}', b"\xff"]
)
def test_reopening_removes_a_torn_line_and_appends(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write({"event": "first"})
    with open(path, "ab") as file:
        file.write(torn)
    assert [event["event"] for event in read_journal(path)] == ["first"]
    with JournalWriter(path) as journal:
        journal.write({"event": "second"})
    assert [event["event"] for event in read_journal(path)] == ["first", "second"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        threads = [
            threading.Thread(
                target=lambda: [journal.write({"event": "step", "x": "y" * 500}) for _ in range(50)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_journal(path))) == 200


def test_durable_events_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("rematic.journal.writer.os.fsync", synced.append)
    journal = JournalWriter(tmp_path / "journal.jsonl")
    journal.write({"event": "step"})
    assert not synced
    for kind in ("switch", "rollback", "checkpoint", "stop"):
        journal.write({"event": kind})
    assert len(synced) == 4
    journal.close()
    assert len(synced) == 5


def test_a_killed_writer_leaves_a_readable_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = (
        "import os, signal, sys; from rematic.journal.writer import JournalWriter\n"
        "journal = JournalWriter(sys.argv[1])\n"
        "for step in range(1000):\n"
        "    journal.write({'event': 'step', 'step': step})\n"
        "    if step == 500: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert [event["step"] for event in read_journal(path)] == list(range(501))


def test_a_disk_that_takes_half_a_line_keeps_none_of_it(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "journal.jsonl"
    code = (
        "import resource, signal, sys; from rematic.journal.writer import JournalWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "journal = JournalWriter(sys.argv[1])\n"
        "journal.write({'event': 'first'})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "try: journal.write({'event': 'second', 'text': 'x' * 200})\n"
        "except OSError as error: print(error)\n"
    )
    assert resource
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    assert "bytes of an event could be written; free some space on its disk" in done.stdout
    assert path.read_bytes().endswith(b"\n")
    assert [event["event"] for event in read_journal(path)] == ["first"]


def test_says_that_two_runs_write_one_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, in every part; a rank that only opens it does not write it."""
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path, part_bytes=1) as first, caplog.at_level(logging.WARNING, "rematic"):
        for _ in range(2):
            first.write({"event": "step"})
            with JournalWriter(path) as second:
                assert not caplog.records
                second.write({"event": "step"})
                second.write({"event": "step"})
            (record,) = caplog.records
            assert f"{path} is being written by another run" in record.getMessage()
            caplog.clear()


def test_a_closed_journal_is_free_even_where_a_worker_has_it_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as first:
        first.write({"event": "step"})
        inherited = os.dup(first._file.fileno())  # what a forked process has: the same opening
    with caplog.at_level(logging.WARNING, "rematic"), JournalWriter(path) as second:
        second.write({"event": "step"})
    os.close(inherited)
    assert not caplog.records

"""Requests to a running job: granted at boundaries, or refused with a reason and no effect."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rematic
from rematic.journal import FILE_NAME as JOURNAL_NAME
from rematic.journal import JournalWriter, read_journal
from rematic.operator_requests import FILE_NAME, REQUESTS_MAX, RequestReader, append_request
from rematic.policy import KEEP, RECOMPUTE
from tests.activations.blocks import make_input, make_model


class Job:
    """A run with a directory, whose operator is impatient."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rematic.operator_requests.POLL_SECONDS", 0.0)
        self.folder = folder
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.journal = JournalWriter(folder / JOURNAL_NAME)
        self.session = rematic.attach(
            self.model, self.optimizer, policy="keep", journal=self.journal
        )

    def micro_batch(self) -> None:
        with self.session.step(make_input()):
            self.model(make_input()).backward()

    def step(self) -> None:
        self.micro_batch()
        self.optimizer.step()

    def answers(self) -> list[dict[str, Any]]:
        return [e for e in read_journal(self.folder / JOURNAL_NAME) if e["event"] == "request"]

    def say(self, line: str) -> None:
        with open(self.folder / FILE_NAME, "a", errors="surrogateescape") as file:
            file.write(line + "\n")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    job.session.detach()
    job.journal.close()


def test_a_pin_takes_effect_at_the_next_boundary(job: Job) -> None:
    job.step()
    request_id = append_request(job.folder, "pin", policy="recompute", reason="night shift")
    job.micro_batch()
    assert job.session.policy == KEEP, "between micro-batches nothing changes"
    job.optimizer.step()
    assert job.session.policy == RECOMPUTE
    assert job.session.history.pinned
    (answer,) = job.answers()
    assert (answer["id"], answer["status"]) == (request_id, "accepted")
    assert answer["reason"] == "by an operator: night shift"
    append_request(job.folder, "unpin")
    job.step()
    assert not job.session.history.pinned


def test_a_rollback_goes_back(job: Job) -> None:
    job.session.switch("recompute")
    job.step()
    append_request(job.folder, "rollback")
    job.step()
    assert job.session.policy == KEEP
    (event,) = [e for e in read_journal(job.folder / JOURNAL_NAME) if e["event"] == "rollback"]
    assert event["reason"] == "by an operator"


def request(**fields: Any) -> str:
    whole = {"schema": 1, "id": "a", "time": time.time(), "request": "unpin"}
    return json.dumps({**whole, **fields})


REFUSED = {
    "not JSON": ("{", "it is not JSON"),
    "bytes": ("\x00\x01", "it is not JSON"),
    "no object": ("[1]", "it is a list: expected an object"),
    "no schema": (json.dumps({"request": "unpin"}), "its schema is None: expected 1"),
    "other schema": (request(schema=2), "its schema is 2: expected 1"),
    "no id": (request(id=None), "its id is None: expected str"),
    "no time": (request(time="now"), "its time is 'now': expected int or float"),
    "stale": (request(time=time.time() - 3600), "seconds ago, expected at most 600"),
    "from the future": (request(time=time.time() + 3600), "it is stale: made -3"),
    "at no time": (request(time=float("nan")), "its time is nan: expected seconds"),
    "beyond all time": (request(time=10**400), "expected seconds since the epoch"),
    "nested": ("[" * 60_000, "it is not JSON"),
    "unknown request": (request(request="stop"), "its request is 'stop': expected one of rollback"),
    "pin to nothing": (request(request="pin"), "its policy is None: expected str"),
    "unknown policy": (request(request="pin", policy="x"), "unknown policy 'x': expected one of"),
    "lossy policy": (request(request="pin", policy="compress"), "loses precision"),
    "nothing to roll back": (request(request="rollback"), "cannot roll back 1 switches"),
    "steps that are no number": (request(request="rollback", steps=True), "its steps is True"),
    "too long": (request(reason="x" * (1 << 16)), "a line of 65"),
    "much too long": (request(reason="x" * (1 << 18)), "a line of 131072 bytes"),
    "an id too long": (request(id="x" * 101), "its id has 101 letters: expected at most 100"),
    "no UTF-8": (request(id="x").replace("x", "\udcff"), "it is not JSON"),
}


@pytest.mark.parametrize(("line", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_granted_is_refused_and_changes_nothing(
    job: Job, line: str, reason: str
) -> None:
    job.step()
    before = job.session.history
    job.say(line)
    job.step()
    (answer,) = job.answers()
    assert answer["status"] == "refused"
    assert reason in str(answer["reason"])
    assert job.session.history == before


def test_a_request_counts_once(job: Job) -> None:
    job.step()
    line = request(request="pin", policy="recompute")
    job.say(line)
    job.step()
    append_request(job.folder, "unpin")
    job.step()
    job.say(line)
    job.step()
    assert [answer["status"] for answer in job.answers()] == ["accepted", "accepted", "refused"]
    assert "was answered already" in str(job.answers()[-1]["reason"])
    assert not job.session.history.pinned


def test_requests_of_an_earlier_process_are_not_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = request(request="pin", policy="recompute")
    (tmp_path / FILE_NAME).write_text(line + "\n")
    job = Job(tmp_path, monkeypatch)
    job.step()
    assert job.answers() == []
    job.say(line)
    job.step()
    assert [answer["status"] for answer in job.answers()] == ["refused"], "replayed"
    assert job.session.policy == KEEP
    job.journal.close()


def test_a_line_that_is_still_being_written_waits(job: Job) -> None:
    job.step()
    line = request(request="pin", policy="recompute") + "\n"
    with open(job.folder / FILE_NAME, "a") as file:
        file.write(line[:20])
        file.flush()
        job.step()
        assert job.answers() == []
        file.write(line[20:])
    job.step()
    assert job.session.policy == RECOMPUTE


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    reader = RequestReader(path, ticks=iter(range(100)).__next__)
    path.write_text(request(id="first") + "\n" + request(id="second") + "\n")
    assert [r.fields["id"] for r in reader.poll()] == ["first", "second"]
    path.write_text(request(id="third") + "\n")
    assert [r.fields["id"] for r in reader.poll()] == ["third"]


def reader_of(path: Path) -> RequestReader:
    """A reader that looks at the file whenever it is asked."""
    return RequestReader(path, ticks=iter(range(10_000)).__next__)


def test_another_file_of_the_same_size_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    reader = reader_of(path)
    path.write_text(request(id="a", time=1) + "\n")
    assert [r.fields["id"] for r in reader.poll()] == ["a"]
    (tmp_path / "new").write_text(request(id="b", time=1) + "\n")
    (tmp_path / "new").replace(path)
    assert [r.fields["id"] for r in reader.poll()] == ["b"]


def test_a_huge_line_is_refused_once_and_read_no_further(tmp_path: Path) -> None:
    """Not kept in memory as a whole, and not read again at every boundary."""
    path = tmp_path / FILE_NAME
    reader = reader_of(path)
    size_bytes = 8 << 20
    path.write_bytes(b"x" * size_bytes)
    tracemalloc.start()
    polls = [reader.poll() for _ in range(100)]
    assert tracemalloc.get_traced_memory()[1] < size_bytes / 4
    tracemalloc.stop()
    (refused,) = [request.refused for requests in polls for request in requests]
    assert str(refused).startswith("a line of 131072 bytes: expected at most 65536")
    with open(path, "a") as file:
        file.write("\n" + request(id="after") + "\n")
    assert [r.fields["id"] for r in reader.poll()] == ["after"]


def test_a_flood_costs_a_bounded_time_at_each_boundary(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    reader = reader_of(path)
    junk, real = "junk\n" * 1500 + "\n" * 100, [f"id-{i}" for i in range(30)]
    path.write_text(junk + "".join(request(id=name) + "\n" for name in real))
    first, second, third, fourth = (reader.poll() for _ in range(4))
    assert [len(first), len(second)] == [1, REQUESTS_MAX + 1]
    assert str(first[0].refused).endswith("; 999 more lines have no id that is a text")
    assert [r.fields["id"] for r in (*second[:-1], *third)] == real
    assert fourth == []


def test_a_pipe_in_its_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    reader = reader_of(path)
    path.write_text(request() + "\n")
    assert len(reader.poll()) == 1
    path.unlink()
    os.mkfifo(path)
    thread = threading.Thread(target=reader.poll, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_of_a_long_file_of_an_earlier_process_the_end_is_known(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(("x" * 60_000 + "\n") * 30 + request(id="last") + "\n" + '{"schema": 1')
    reader = reader_of(path)
    with open(path, "a") as file:
        file.write(request(id="new")[12:] + "\n" + request(id="last") + "\n")
    assert [(r.fields["id"], r.refused is None) for r in reader.poll()] == [
        ("new", True),
        ("last", False),
    ]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    reader = reader_of(tmp_path / FILE_NAME)
    assert reader.poll() == []
    append_request(tmp_path, "unpin")
    assert [r.refused for r in reader.poll()] == [None]


def test_two_operators_at_once_lose_no_request(tmp_path: Path) -> None:
    reader, made = reader_of(tmp_path / FILE_NAME), []

    def operate(policy: str) -> None:
        made.extend(append_request(tmp_path, "pin", policy=policy) for _ in range(40))

    threads = [threading.Thread(target=operate, args=(name,)) for name in ("keep", "recompute")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [request for _ in range(4) for request in reader.poll()]
    assert sorted(str(r.fields["id"]) for r in found) == sorted(made)
    assert all(r.refused is None for r in found)


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert RequestReader(tmp_path / FILE_NAME).poll() == []


def test_the_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    now = [0.0]
    reader = RequestReader(tmp_path / FILE_NAME, ticks=lambda: now[0])
    assert reader.poll() == []
    append_request(tmp_path, "unpin")
    now[0] = 0.9
    assert reader.poll() == []
    now[0] = 1.1
    assert len(reader.poll()) == 1


def test_a_session_without_a_file_hears_nobody() -> None:
    session = rematic.attach(make_model(), policy="keep")
    assert session.settings.supervision.requests is None
    session.detach()

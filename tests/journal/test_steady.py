"""A disk that takes nothing ends no training, and the gap in the journal is told of."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rematic
from rematic.control import audit
from rematic.journal import JournalError, JournalWriter, SteadyJournal, read_journal
from rematic.journal.events import FILE_NAME
from tests.activations.blocks import make_input, make_model


class Disk:
    """A journal on a disk that may be full."""

    def __init__(self, folder: Path) -> None:
        self.writer = JournalWriter(folder / FILE_NAME)
        self.path = self.writer.path
        self.is_full = False

    def write(self, event: Mapping[str, object]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        self.writer.write(event)

    def events(self) -> list[dict[str, Any]]:
        return list(read_journal(self.path))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.writer.close()


def test_lost_events_are_counted_and_told_of_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    journal = SteadyJournal(disk)
    for number in range(10):
        disk.is_full = 2 <= number < 5 or number == 7
        journal.write({"event": "step", "step": number})
    told = [(e["event"], e["step"], e.get("figures")) for e in disk.events()]
    assert told == [
        ("step", 0, None),
        ("step", 1, None),
        ("notice", 5, {"lost": 3}),
        ("step", 5, None),
        ("step", 6, None),
        ("notice", 8, {"lost": 1}),
        ("step", 8, None),
        ("step", 9, None),
    ]
    assert journal.num_gaps == 2
    assert journal.path == disk.path
    assert [m.split(". ")[0] for m in caplog.messages] == [
        f"the journal cannot be written: [Errno 28] No space left on device: '{disk.path}'"
    ] * 2


def test_a_journal_that_cannot_be_begun_is_refused(disk: Disk) -> None:
    disk.is_full = True
    with pytest.raises(OSError, match="No space left"):
        rematic.attach(make_model(), policy="keep", journal=disk)


def test_other_errors_pass(disk: Disk) -> None:
    with pytest.raises(JournalError, match="needs its kind"):
        SteadyJournal(disk).write({"step": 1})


def test_a_training_goes_on_and_is_audited_behind_the_gap(disk: Disk) -> None:
    model = make_model()
    untimed = {"goals": {"slowdown_max": 1e9}}  # else a slow machine takes the switch back
    session = rematic.attach(model, policy="keep", journal=disk, recipe=untimed)
    for number in range(12):
        disk.is_full = 3 <= number < 6
        if number == 4:
            session.switch("recompute")
        with session.step(make_input()):
            model(make_input()).backward()
    session.detach()
    assert session.num_steps == 12
    events = disk.events()
    assert [e["step"] for e in events if e["event"] == "step"] == [0, 1, 2, *range(6, 12)]
    report = audit(events)
    assert report.differences == ()
    assert (report.num_steps, report.num_unaudited) == (8, 1), "the one before `control` came"
    assert session.policy.name == "recompute"

"""The memory snapshot of a run that stops; a stand-in writes it, since there is no device here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rematic
from rematic.activations import torch_private
from rematic.journal import JournalWriter, read_journal
from rematic.recipes import PolicyConfig, Recipe
from rematic.stop_snapshot import FILE_NAME
from tests.step_models import make_batches, make_tied_model


def run_until_it_stops(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    write: Callable[[str], None] | None,
    checkpoint: Path | None,
) -> tuple[rematic.StepOutOfMemoryError, object]:
    monkeypatch.setattr(torch_private, "memory_snapshot_writer", lambda: write)
    model = make_tied_model()
    with JournalWriter(folder / "journal.jsonl") as journal:
        session = rematic.attach(
            model,
            policy="keep",
            recipe=Recipe(policy=PolicyConfig(op_retry="never")),
            journal=journal,
        )
        if checkpoint is not None:
            session.at_stop = lambda report: str(checkpoint)

        def step(ids: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        with pytest.raises(rematic.StepOutOfMemoryError) as caught:
            session.run(step, make_batches(1)[0])
        session.detach()
    (stop,) = [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "stop"]
    return caught.value, stop["memory_snapshot"]


def write_file(path: str) -> None:
    Path(path).write_bytes(b"blocks")


@pytest.mark.parametrize(
    "saved", [True, False], ids=["beside the checkpoint", "beside the journal"]
)
def test_it_is_written_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: bool
) -> None:
    checkpoint = tmp_path / "saved" / "last.ckpt" if saved else None
    (tmp_path / "saved").mkdir()
    error, told = run_until_it_stops(monkeypatch, tmp_path, write=write_file, checkpoint=checkpoint)
    path = (tmp_path / "saved" if saved else tmp_path) / FILE_NAME
    assert path.read_bytes() == b"blocks"
    assert error.report.memory_snapshot == told == str(path)
    assert f"What the device held is in {path}." in str(error)
    assert dict(error.report.resident_bytes)["weights"] > 0


def test_one_that_cannot_be_written_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: str) -> None:
        raise OSError("disk full")

    error, told = run_until_it_stops(monkeypatch, tmp_path, write=fails, checkpoint=None)
    assert error.report.memory_snapshot is None
    assert told is None
    assert any("could not be written" in m and "disk full" in m for m in caplog.messages)


def test_without_a_device_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error, _ = run_until_it_stops(monkeypatch, tmp_path, write=None, checkpoint=None)
    assert error.report.memory_snapshot is None
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_torch_writes_it_where_a_device_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.memory_snapshot_writer() is None or torch.cuda.is_initialized()
    monkeypatch.setattr(torch_private, "_HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert torch_private.memory_snapshot_writer() is torch.cuda.memory._dump_snapshot
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    assert torch_private.memory_snapshot_writer() is None
